"""What the rules of the samples pass over, and how they look without a file's statistics."""

from __future__ import annotations

import pyarrow.parquet as pq
from cases_data import change_column, early, foreign_id, samples
from place import TURN, Place

from kimi_eagle.contracts import judge, rules


def verdict(place: Place, rule: str):
    found = judge(place.facts(), [r for r in rules().values() if r.id in (rule, "data-format")])
    return next(v for v in found if v.rule.id == rule)


def test_ids_are_read_where_a_file_has_no_statistics(place: Place):
    foreign_id(place)
    for path in place.given["samples"]:
        pq.write_table(pq.read_table(path), path, write_statistics=False)
    assert verdict(place, "data-token-ids").problems[0].what == "token id 384 in the samples"
    samples(place)
    for path in place.given["samples"]:
        pq.write_table(pq.read_table(path), path, write_statistics=False)
    assert verdict(place, "data-token-ids").state == "ok"


def test_answers_without_their_end_are_no_shifted_masks(place: Place):
    early(place)
    change_column(
        place, "input_ids", lambda rows: [[7 if t == TURN else t for t in row] for row in rows]
    )
    assert verdict(place, "data-mask").state == "ok"


def test_one_odd_sample_of_many_is_no_fault(place: Place):
    def change(fields):
        fields["loss_mask"][15] = False  # this answer's end of turn alone

    samples(place, change)
    assert verdict(place, "data-mask").state == "ok"
