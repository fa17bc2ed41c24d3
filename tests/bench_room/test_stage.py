"""The stage: what was measured under an earlier key is not measured again."""

from pathlib import Path

from kimi_eagle.stages.benchmark import take_earlier


def test_measurements_of_earlier_keys_are_taken(tmp_path: Path):
    earlier, now = (tmp_path / f"work-{key}/measurements" for key in "ab")
    earlier.mkdir(parents=True)
    now.mkdir(parents=True)
    for name in ("baseline-1.json", "draft-1.json", "draft-1.log"):
        (earlier / name).write_text("earlier")
    (now / "draft-1.json").write_text("mine")
    take_earlier(tmp_path, now)
    take_earlier(tmp_path, now)
    assert {p.name: p.read_text() for p in now.iterdir()} == {
        "baseline-1.json": "earlier",
        "draft-1.json": "mine",
    }
    take_earlier(tmp_path, tmp_path / "work-c/measurements")
    assert (tmp_path / "work-c/measurements/baseline-1.json").read_text() == "earlier"
