from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvdock.errors import ArgumentValueError
from kvdock.replay import FORMATS, TraceFormat, TraceRequest, read_trace
from support_replay import AZURE, CONVERSATION, HEADER, row, write_rows


def test_mooncake_rows(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "t", [row([0, 7], length=600, at_ms=27_000, output=5), row([0], length=1, at_ms=27_500.0)])
    trace = read_trace(path)
    assert trace.format == "mooncake"
    assert trace.requests == (TraceRequest(1, 0.0, 600, 5, (0, 7)), TraceRequest(2, 0.5, 1, 0, (0,)))
    assert (trace.input_tokens, trace.output_tokens) == (601, 5)


def test_azure_rows(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text(f"{HEADER}\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:18:04.0319600,3180,8", encoding="utf-8")
    trace = read_trace(path)
    assert trace.format == "azure"
    first, second = trace.requests
    assert first == TraceRequest(2, 0.0, 4808, 10, None)
    assert (second.line, second.input_length, second.output_length) == (3, 3180, 8)
    assert second.arrival_s == pytest.approx(60.052, abs=1e-5)


@pytest.mark.parametrize(
    ("path", "name", "inputs", "outputs"), [(CONVERSATION, "mooncake", 4_269_971, None), (AZURE, "azure", 270_000, None)]
)
def test_the_excerpts(path: Path, name: str, inputs: int, outputs: int | None) -> None:
    trace = read_trace(path)
    assert (trace.format, len(trace.requests)) == (name, 300)
    if name == "mooncake":
        raw = [json.loads(line) for line in path.read_text().splitlines()]
        assert trace.input_tokens == inputs == sum(one["input_length"] for one in raw)
        assert trace.output_tokens == sum(one["output_length"] for one in raw)
    else:
        fields = [line.split(",") for line in path.read_text().splitlines()[1:]]
        assert trace.input_tokens == sum(int(one[1]) for one in fields)
        assert trace.output_tokens == sum(int(one[2]) for one in fields)
    assert [one.arrival_s for one in trace.requests] == sorted(one.arrival_s for one in trace.requests)


def test_the_excerpts_say_where_they_are_from() -> None:
    text = (CONVERSATION.parent / "README.md").read_text(encoding="utf-8")
    for word in (CONVERSATION.name, AZURE.name, "kvcache-ai/Mooncake", "Apache-2.0", "CC-BY-4.0", "Splitwise", "ISCA"):
        assert word in text


def test_the_limit_counts_requests_and_reads_no_further(tmp_path: Path) -> None:
    path = tmp_path / "t"
    path.write_text("\n" + json.dumps(row([1])) + "\n\n" + json.dumps(row([2])) + "\nbroken\n", encoding="utf-8")
    assert [one.line for one in read_trace(path, limit=2).requests] == [2, 4]
    with pytest.raises(ArgumentValueError, match="line 5: expected a JSON object, got 'broken'"):
        read_trace(path)
    assert len(read_trace(AZURE, limit=3).requests) == 3


GOOD = row([1, 2], length=600, output=3)
BROKEN_MOONCAKE = {
    "no object": ("[1]", "line 2: expected an object with timestamp, input_length, output_length, hash_ids, got '[1]'"),
    "cut off": ('{"timestamp": 1', "line 2: expected a JSON object, got "),
    "deeper than Python goes": ("[" * 100_000, "line 2: expected a JSON object, got "),
    "a field missing": (json.dumps({key: value for key, value in GOOD.items() if key != "hash_ids"}), "without hash_ids"),
    "negative": (json.dumps(GOOD | {"output_length": -1}), "line 2: output_length: expected an integer of at least 0, got -1"),
    "empty prompt": (json.dumps(GOOD | {"input_length": 0}), "line 2: input_length: expected an integer of at least 1, got 0"),
    "a fraction": (json.dumps(GOOD | {"input_length": 600.5}), "line 2: input_length: expected an integer of at least 1, got 600.5"),
    "a bool": (json.dumps(GOOD | {"input_length": True}), "line 2: input_length: expected an integer of at least 1, got True"),
    "too few ids": (json.dumps(GOOD | {"hash_ids": [1]}), "line 2: hash_ids: expected 2, one for each 512 of 600 tokens, got 1 of them"),
    "ids that are none": (json.dumps(GOOD | {"hash_ids": 7}), "line 2: hash_ids: expected 2, one for each 512 of 600 tokens, got 7"),
    "an id that is none": (json.dumps(GOOD | {"hash_ids": [1, "x"]}), "line 2: hash_ids[1]: expected an integer of at least 0, got 'x'"),
    "a negative id": (json.dumps(GOOD | {"hash_ids": [-1, 2]}), "line 2: hash_ids[0]: expected an integer of at least 0, got -1"),
    "time as text": (json.dumps(GOOD | {"timestamp": "now"}), "line 2: timestamp: expected milliseconds, got 'now'"),
    "no time at all": (json.dumps(GOOD | {"timestamp": float("nan")}), "line 2: timestamp: expected milliseconds, got nan"),
    "a time beyond floats": ('{"timestamp": 1' + "0" * 400 + json.dumps(GOOD)[15:], "line 2: timestamp: expected milliseconds, got 1000"),
    "back in time": (json.dumps(GOOD | {"timestamp": -500}), "line 2: time: expected none before that of line 1, got 0.5 s before it"),
}


@pytest.mark.parametrize("case", BROKEN_MOONCAKE)
def test_a_broken_line_of_mooncake_is_named(tmp_path: Path, case: str) -> None:
    line, text = BROKEN_MOONCAKE[case]
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n{line}\n", encoding="utf-8")
    with pytest.raises(ArgumentValueError) as caught:
        read_trace(path)
    assert text in str(caught.value)
    assert str(path) in str(caught.value)


BROKEN_AZURE = {
    "2023-11-16 18:17:03,12": "line 3: expected 3 fields: TIMESTAMP,ContextTokens,GeneratedTokens, got '2023-11-16 18:17:03,12'",
    "yesterday,12,3": "line 3: TIMESTAMP: expected a date and time such as 2023-11-16 18:17:03.9799600, got 'yesterday'",
    "2023-11-16 18:17:03,0,3": "line 3: ContextTokens: expected an integer of at least 1, got 0",
    "2023-11-16 18:17:03,12,-3": "line 3: GeneratedTokens: expected an integer of at least 0, got '-3'",
    "2023-11-16 18:17:03,1.5,3": "line 3: ContextTokens: expected an integer of at least 1, got '1.5'",
    f"2023-11-16 18:17:03,{'9' * 5000},3": "line 3: ContextTokens: expected an integer of at least 1, got '999",
    "2023-11-16 18:17:01,12,3": "line 3: time: expected none before that of line 2, got 1 s before it",
}


@pytest.mark.parametrize("line", BROKEN_AZURE, ids=lambda line: line[:30])
def test_a_broken_line_of_azure_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"{HEADER}\n2023-11-16 18:17:02,5,5\n{line}\n", encoding="utf-8")
    with pytest.raises(ArgumentValueError) as caught:
        read_trace(path)
    assert BROKEN_AZURE[line] in str(caught.value)


def test_files_that_are_no_trace(tmp_path: Path) -> None:
    def refused(name: str, content: bytes | None) -> str:
        path = tmp_path / name
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(ArgumentValueError) as caught:
            read_trace(path)
        return str(caught.value)

    assert "(No such file or directory)" in refused("nothing", None)
    assert "expected a trace, got an empty file. Fix: pass a file that begins with" in refused("empty", b"\n \n")
    assert "expected at least one request, got none" in refused("only a header", HEADER.encode())
    assert "a text file that can be read" in refused("binary", b"\xff\xfe\x00\x01")
    other = refused("other", b"a,b,c\n1,2,3\n")
    assert "line 1: expected the beginning of a trace, got 'a,b,c'" in other
    for known in FORMATS:
        assert known.looks_like in other
    with pytest.raises(ArgumentValueError, match="Is a directory"):
        read_trace(tmp_path)


@pytest.mark.parametrize("known", FORMATS, ids=lambda one: one.name)
def test_a_format_recognises_its_own_example_and_no_other(known: TraceFormat) -> None:
    assert [one.name for one in FORMATS if one.recognises(known.looks_like)] == [known.name]


def test_another_format_is_another_class_and_nothing_else(tmp_path: Path) -> None:
    class Lengths(TraceFormat):
        name = "lengths"
        looks_like = "# lengths"
        header_lines = 1

        def recognises(self, first: str) -> bool:
            return first.startswith("# lengths")

        def parse(self, text: str, line: int, subject: str) -> TraceRequest:
            return TraceRequest(line, 5.0, int(text), 0, None)

    path = tmp_path / "t"
    path.write_text("# lengths\n3\n4\n", encoding="utf-8")
    trace = read_trace(path, formats=(*FORMATS, Lengths()))
    assert (trace.format, [one.input_length for one in trace.requests], trace.requests[0].arrival_s) == ("lengths", [3, 4], 0.0)
