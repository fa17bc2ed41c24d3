"""A model directory that this program makes itself: complete or not there, made once, kept whole.

`demo_model` and `toy` say what goes in; here is how it gets there: in a folder beside the place,
sealed with `kimi-eagle-model.json` (format, source, sizes and digests of all files, written last)
and renamed. What somebody else put at the place is never deleted. No torch at import.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from kimi_eagle.errors import RunError, UsageError
from kimi_eagle.files import sha256_file

MARKER = "kimi-eagle-model.json"
"""Written last; holds format, source and {file: {size, sha256}}."""
SMALL = 16 << 20
"""Files under this many bytes are hashed at each set-up, larger ones only compared in size."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class ModelDir:
    """name: of the directory under the cache. format: changes when the making does, so that what
    an older version made is made anew."""

    name: str
    format: str

    def default_path(self) -> Path:
        """Where the model lies unless told otherwise: under $KIMI_EAGLE_CACHE, else ~/.cache."""
        cache = os.environ.get("KIMI_EAGLE_CACHE") or "~/.cache/kimi-eagle"
        return Path(cache).expanduser() / "models" / self.name

    def is_complete(self, dest: Path) -> bool:
        """Whether `dest` holds a finished model of the present format.

        Every file has its recorded size; the small ones are hashed as well (the weights are not:
        this runs at each set-up and `verifier hash` does it when asked).
        """
        try:
            marker = json.loads((dest / MARKER).read_text(encoding="utf-8"))
            if marker["format"] != self.format:
                return False
            for name, want in marker["files"].items():
                file = dest / name
                if file.stat().st_size != want["size"]:
                    return False
                if want["size"] < SMALL and sha256_file(file) != want["sha256"]:
                    return False
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return False
        return True

    def ensure(
        self, dest: Path | None, build: Callable[[Path], None], *, source: str, say: Say
    ) -> Path:
        """The path of a complete model; where it is not there, `build(folder)` fills a new folder.

        A directory at `dest` that this program made and that is damaged or of an older format is
        replaced. Anything else there is never deleted: at the default place it is set aside under
        a name ending in `.aside-N`, at a place of the user's choice it is an error.
        Raises UsageError (something else lies at `dest`), RunError (making it failed).
        """
        chosen = dest is not None
        dest = Path(dest).expanduser() if chosen else self.default_path()
        if self.is_complete(dest):
            return dest
        ours = (dest / MARKER).is_file()
        empty = dest.is_dir() and not any(dest.iterdir())
        if chosen and dest.exists() and not ours and not empty:
            raise UsageError(
                "exists and was not made by this program",
                where=dest,
                expected="a new or empty directory",
                fix="give another directory",
            )
        try:
            dest.parent.mkdir(parents=True, exist_ok=True)
            work = Path(tempfile.mkdtemp(prefix=f".{self.name}.", dir=dest.parent))
        except OSError as e:
            raise UsageError(f"cannot write: {e.strerror}", where=dest.parent) from None
        try:
            made = work / self.name
            made.mkdir()
            build(made)
            self.seal(made, source)
            self._put(made, dest, delete_old=ours or empty, say=say)
        except OSError as e:
            raise RunError(f"cannot make the model: {e.strerror or e}", where=dest) from None
        finally:
            shutil.rmtree(work, ignore_errors=True)
        return dest

    def seal(self, folder: Path, source: str) -> None:
        """Flush every file and write the marker with sizes and digests."""
        files = {}
        for file in sorted(folder.iterdir()):
            file.chmod(0o644)
            files[file.name] = {"size": file.stat().st_size, "sha256": sha256_file(file)}
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        marker = {"format": self.format, "source": source, "files": files}
        with (folder / MARKER).open("w", encoding="utf-8") as handle:
            handle.write(json.dumps(marker, indent=1) + "\n")
            handle.flush()
            os.fsync(handle.fileno())

    def _put(self, made: Path, dest: Path, *, delete_old: bool, say: Say) -> None:
        """Rename `made` to `dest`; what lies there goes first, deleted or set aside."""
        made.chmod(0o755)
        if dest.exists() or dest.is_symlink():
            names = (dest.with_name(f"{self.name}.aside-{n}") for n in range(1, 10_000))
            aside = next(p for p in names if not p.exists())
            os.rename(dest, aside)
            if delete_old:
                shutil.rmtree(aside, ignore_errors=True)
            else:
                say(f"set aside what lay there: {aside}")
        try:
            os.rename(made, dest)
        except OSError:
            if not self.is_complete(dest):  # else another set-up was faster, with the same result
                raise
