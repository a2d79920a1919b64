"""Reading compiled programs: loops, types, collectives in every spelling, FLOPs (issue: plan)."""

from __future__ import annotations

import pytest

from decomp.plan import census, hlo

SIZES = {"replicate": 4, "fsdp": 8, "tp": 1}

PROGRAM = """HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (p: (s32[], f32[4,8])) -> (s32[], f32[4,8]) {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[4,8]{1,0} get-tuple-element(%p), index=1
  %w = bf16[8,8]{1,0} constant({...})
  %h = bf16[4,8]{1,0} convert(%x)
  %y = bf16[4,8]{1,0} dot(%h, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  %r = bf16[4,8]{1,0} all-reduce(%y), replica_groups=[8,4]<=[4,8]T(1,0), to_apply=%add, metadata={op_name="psum"}
  %z = f32[4,8]{1,0} convert(%r)
  ROOT %t = (s32[], f32[4,8]{1,0}) tuple(%i, %z)
}

%condition (p: (s32[], f32[4,8])) -> pred[] {
  %p = (s32[], f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(5)
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%unused (q: f32[2,2]) -> f32[2,2] {
  %q = f32[2,2]{1,0} parameter(0)
  ROOT %d = f32[2,2]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (x: f32[4,8], v: f32[2,16]) -> f32[4,8] {
  %x = f32[4,8]{1,0} parameter(0)
  %v = f32[2,16]{1,0} parameter(1)
  %g = f32[2,128]{1,0} all-gather(%v), replica_groups={{0,1,2,3,4,5,6,7},{8,9,10,11,12,13,14,15}}, dimensions={1}
  %zero = s32[] constant(0)
  %init = (s32[], f32[4,8]{1,0}) tuple(%zero, %x)
  %loop = (s32[], f32[4,8]{1,0}) while(%init), condition=%condition, body=%body
  ROOT %out = f32[4,8]{1,0} get-tuple-element(%loop), index=1
}
"""


def test_loops_count_times_their_length():
    module = hlo.parse(PROGRAM)
    assert module.entry == "main"
    assert module.runs["body"] == hlo.Runs(5, True) and module.runs["condition"].times == 6
    assert module.runs["add"].times == 5 and "unused" not in module.runs
    assert module.unknown_loops == []
    assert census.flops(module) == {"bf16": 5 * 2 * 4 * 8 * 8}


def test_the_note_of_the_optimised_program_gives_the_length():
    noted = PROGRAM.replace("body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"7"}}')
    assert hlo.parse(noted).runs["body"].times == 7


def test_a_loop_of_unknown_length_is_said():
    module = hlo.parse(PROGRAM.replace("s32[] constant(5)", "s32[] get-tuple-element(%p), index=0"))
    assert module.unknown_loops == ["loop"] and module.runs["body"].times == 1


def test_collectives_have_axis_bytes_count_and_place():
    gather, reduce = census.collectives(hlo.parse(PROGRAM), SIZES)
    assert (reduce.kind, reduce.axes, reduce.dtype, reduce.times, reduce.in_loop) == (
        "all-reduce", ("replicate",), "bf16", 5, True,
    )  # fmt: skip
    assert reduce.total == pytest.approx(5 * 2 * 64 * 3 / 4) and reduce.elements == 32 and reduce.origin == "psum"
    assert (gather.axes, gather.in_loop, gather.times) == (("fsdp",), False, 1)
    assert gather.total == pytest.approx(2 * 128 * 4 * 7 / 8)


@pytest.mark.parametrize(
    ("spelled", "group"),
    [
        ("replica_groups={{0,8,16,24},{1,9,17,25}}", [0, 8, 16, 24]),
        ("replica_groups=[8,4]<=[4,8]T(1,0), x", [0, 8, 16, 24]),
        ("replica_groups=[4,8]<=[32]", list(range(8))),
        ("replica_groups=mesh['axis_0'=4,'axis_1'=8] {'axis_0'}, y", [0, 8, 16, 24]),
        ("replica_groups=mesh['a'=8,'b'=4], device_ids=([4,8]T(1,0)) {'b'}", [0, 8, 16, 24]),
        ("replica_groups=mesh['a'=32] {'a':(1)4}", [0, 8, 16, 24]),
        ("replica_groups=mesh['a'=32] {'a':(4)8}", list(range(8))),
        ("replica_groups=mesh['a'=32] {'a':(4)2}", [0, 4]),
        ("source_target_pairs={{0,1},{1,2}}", [0, 1]),
        ("replica_groups={}", list(range(32))),
    ],
)
def test_groups_in_every_spelling(spelled: str, group: list[int]):
    assert census.first_group(f"channel_id=3, {spelled}", 32) == group


def test_an_unknown_spelling_is_an_error():
    with pytest.raises(ValueError, match="spelled in an unknown way"):
        census.first_group("replica_groups=<new>", 32)


@pytest.mark.parametrize(
    ("group", "axes"),
    [([0, 8, 16, 24], ("replicate",)), ([0, 1], ("fsdp",)), ([0, 9], ("replicate", "fsdp")), ([3], ())],
)
def test_axes_are_those_along_which_members_differ(group: list[int], axes: tuple[str, ...]):
    assert census.axes_of(group, SIZES) == axes


def test_an_asynchronous_start_counts_its_result_alone():
    done = "%d = f32[2,128]{1,0} all-gather-done(%g)"
    text = PROGRAM.replace(
        "%g = f32[2,128]{1,0} all-gather(%v)", "%g = (f32[2,16]{1,0}, f32[2,128]{1,0}) all-gather-start(%v)"
    ).replace("  %zero = s32[] constant(0)", f"  {done}\n  %zero = s32[] constant(0)")
    gathers = [c for c in census.collectives(hlo.parse(text), SIZES) if c.kind == "all-gather"]
    assert [c.total for c in gathers] == [pytest.approx(2 * 128 * 4 * 7 / 8)]


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse("HloModule empty")
