"""Calls of tools, from what a model writes to what it is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from surogate_rl.rollouts.environments import Environments, make_environments
from surogate_rl.rollouts.environments.named import EnvironmentConfigError
from surogate_rl.rollouts.environments.tool_formats import FORMATS, ToolCall, format_of, parse
from surogate_rl.rollouts.environments.tools import ToolDialect
from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.types import EpisodeLimits, Task
from surogate_rl.trainers.rollout_log import RolloutLog

Family = Callable[[str], Any]
HERE = Path(__file__).parent
NAMES = ["add", "greet", "later", "fails", "leaves", "dies", "hangs", "long"]
SCHEMAS: dict[str, dict[str, Any]] = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "greet": {"properties": {"name": {"type": "string"}}},
}
ADD = ToolCall("add", {"a": 1, "b": 2})


# ---- reading ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("hermes", '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>', "", [ADD]),
        ("hermes", 'I add.\n<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>', "I add.", [ADD]),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}', "", [ADD]),  # the closing tag is missing
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>', "", [ADD]),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>\n'
            '<tool_call>{"name": "greet", "arguments": {}}</tool_call>',
            "",
            [ADD, ToolCall("greet")],
        ),
        (
            "hermes",
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
            "",
            [ADD],
        ),
        (
            "hermes",
            "<tool_call><function=greet><parameter=name>7</parameter></function></tool_call>",
            "",
            [ToolCall("greet", {"name": "7"})],
        ),
        ("hermes", "no call", "no call", []),
        ("hermes", '<think>{"name"} <tool_call>x</tool_call></think>\n42', '<think>{"name"} <tool_call>x</tool_call></think>\n42', []),
        ("hermes", "<think>I could <tool_call>", "<think>I could <tool_call>", []),
        (
            "hermes",
            '<think>so</think><tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
            "<think>so</think>",
            [ADD],
        ),
        ("llama3", '{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
        ("llama3", '<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": 2}}', "", [ADD]),
        ("llama3", '{"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": "greet", "parameters": {}}', "", [ADD, ToolCall("greet")]),
        ("llama3", 'The object is {"name": "add"}', 'The object is {"name": "add"}', []),
        ("llama3", '{"colour": "blue"}', '{"colour": "blue"}', []),  # JSON, but no call
        ("mistral", '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "000000000"}]', "", [ADD]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}', "", [ADD]),
        ("mistral", '[TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]greet[ARGS]{}', "", [ADD, ToolCall("greet")]),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}greet[ARGS]{}', "", [ADD, ToolCall("greet")]),
        ("json", 'Here:\n```json\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n```', "Here:", [ADD]),
        ("json", '{"name": "add", "arguments": {"a": 1, "b": 2}}', "", [ADD]),
        ("json", '[{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]', "", [ADD]),
        ("json", "<function=add><parameter=a>1</parameter><parameter=b>2</parameter></function>", "", [ADD]),
        ("json", '```json\n{"colour": "blue"}\n```', '```json\n{"colour": "blue"}\n```', []),
        ("json", "it is 42", "it is 42", []),
    ],
)
def test_calls_of_the_families(kind: str, text: str, content: str, calls: list[ToolCall]) -> None:
    found = parse(text, kind, SCHEMAS)
    assert found.calls == calls
    assert found.content == content


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("hermes", "<tool_call>{add 1 2}</tool_call>", "the call is no valid JSON: {add 1 2}"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1</tool_call>', "the call is no valid JSON"),
        ("hermes", "<tool_call></tool_call>", "the call is no valid JSON"),
        ("hermes", "<tool_call>[1, 2]</tool_call>", 'a call must be an object with "name" and "arguments", got 1'),
        ("hermes", '<tool_call>{"arguments": {}}</tool_call>', 'a call must be an object with "name" and "arguments"'),
        ("hermes", '<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'a call must be an object with "name"'),
        ("hermes", '<tool_call>{"name": "add", "arguments": [1, 2]}</tool_call>', "the arguments must be a JSON object, got [1, 2]"),
        ("hermes", '<tool_call>{"name": "add", "arguments": {}} and</tool_call>', "the call is no valid JSON"),
        ("llama3", '{"name": "add", "parameters": {"a": 1', "the call is no valid JSON"),
        ("llama3", "<|python_tag|>print(1)", "the call is no valid JSON"),
        ("mistral", "[TOOL_CALLS] add 1 2", "the call is no valid JSON"),
        ("mistral", "[TOOL_CALLS]add[ARGS]1", "the arguments are no JSON object: 1"),
        ("json", '```json\n{"name": "add", "arguments": {"a": \n```', "the call is no valid JSON"),
        ("hermes", "<tool_call>" + "[" * 5000, "the call is no valid JSON"),
        (
            "hermes",
            '<tool_call>{"name": "add", "arguments": ' + "[" * 500 + "]" * 500 + "}</tool_call>",
            "the call is no valid JSON",  # nested beyond reason
        ),
    ],
)
def test_what_cannot_be_read_becomes_words_for_the_model(kind: str, text: str, problem: str) -> None:
    found = parse(text, kind, SCHEMAS).calls
    assert found
    assert found[-1].problem is not None or found[0].problem is not None
    assert any((call.problem or "").startswith(problem) for call in found)


@pytest.mark.parametrize("kind", list(FORMATS))
def test_any_text_can_be_read(kind: str) -> None:
    from hypothesis import given, settings
    from hypothesis import strategies as st

    tags = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<think>", "</think>", "```json\n", "```"]
    pieces = [
        *tags,
        "<function=add>",
        "<parameter=a>",
        '{"name": "add"',
        ', "arguments": ',
        "{",
        "}",
        "[",
        "]",
        ";",
        "1",
        "null",
        " ",
        "\n",
    ]

    @settings(max_examples=300, deadline=None)
    @given(st.lists(st.sampled_from(pieces) | st.text(max_size=3), max_size=12))
    def check(parts: list[str]) -> None:
        found = parse("".join(parts), kind, SCHEMAS)
        assert all(isinstance(call.arguments, dict) for call in found.calls)

    check()


def test_the_format_is_that_of_the_template(family: Family) -> None:
    formats = {"qwen2_5": "hermes", "qwen3": "hermes", "llama3_1": "llama3", "mistral": "mistral"}
    for name, expected in formats.items():
        dialect = ToolDialect.of(family(name))
        assert dialect == ToolDialect(expected, True, True, name != "mistral"), name
    # templates without tools: they are described in words, and results are shown under the role that the template writes
    assert ToolDialect.of(family("smollm2")) == ToolDialect("hermes", False, True, True)
    assert format_of("nothing") == "json"


# ---- running ------------------------------------------------------------------------------------------------------------------------


def make(tokenizer: Any, *names: str, **args: Any) -> Environments:
    return make_environments("tools", {"tools": [f"{HERE / 'tool_functions.py'}:{name}" for name in names or NAMES], **args}, tokenizer)


@pytest.fixture(scope="module")
def tools(family: Family) -> Iterator[Environments]:
    environments = make(family("qwen2_5"), timeout=3.0, max_result_length=120)
    yield environments
    environments.close()


def call(tool: str, /, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


TASK = Task(0, [{"role": "user", "content": "what is 1 + 2?"}], None, {"answer": "3"})


def test_an_episode_with_tools(tools: Environments, family: Family, play: Callable[..., Any]) -> None:
    tokenizer = family("qwen2_5")
    task = tools.prepare(TASK)
    both = call("add", a=3) + "\n" + call("greet", name="Ann")
    episode, engine = play(tokenizer, tools.make, [call("add", a=1, b=2), both, "It is 3."], task=task, inline=True)
    assert episode.error is None
    assert (episode.turns, episode.cut, episode.truncated, episode.completion) == (3, None, False, "It is 3.")
    assert episode.info == {"tool_calls": 3.0, "tool_failures": 0.0}
    assert [m["role"] for m in episode.messages] == ["user", "assistant", "tool", "assistant", "tool", "tool", "assistant"]
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == ["3", "3", '{"said": "hello Ann"}']
    assert episode.messages[1]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1, "b": 2}}
    first = tokenizer.decode(engine.requests[0].prompt)
    assert '"name": "add", "description": "Adds two numbers."' in first
    assert "the second number" in first
    (segment,) = episode.segments
    assert tokenizer.decode(segment.tokens) == tokenizer.apply_chat_template(episode.messages, tools=task.tools, tokenize=False).rstrip(
        "\n"
    )
    assert episode.environment_reward is None  # rewards judge the answer


@pytest.mark.parametrize(
    ("written", "told"),
    [
        (call("fails", text="no luck"), "Error: ValueError: no luck"),
        (call("leaves", code=3), "Error: SystemExit: 3"),
        (call("dies", code=3), "Error: dies failed: the worker process died (killed by SIGKILL, perhaps for lack of memory)"),
        (call("hangs", seconds=60), "Error: hangs gave no result within 3 s"),
        (call("add", c=1), "Error: missing a required argument: 'a'"),
        (call("subtract", a=1), "Error: there is no tool 'subtract'; the tools are add, greet, later, fails, leaves, dies, hangs, long"),
        ("<tool_call>\n{add}\n</tool_call>", "Error: the call is no valid JSON: {add}"),
        (call("later", text="ok"), "OK"),
        (call("long", count=150), "x" * 120 + "... (30 more characters)"),
    ],
)
def test_what_goes_wrong_is_told_to_the_model(
    tools: Environments, family: Family, play: Callable[..., Any], written: str, told: str
) -> None:
    episode, _ = play(family("qwen2_5"), tools.make, [written, "so"], task=tools.prepare(TASK), inline=True)
    assert (episode.error, episode.turns) == (None, 2)
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == [told]
    assert episode.info == {"tool_calls": 1.0, "tool_failures": float(told.startswith("Error"))}


def test_a_lone_surrogate_in_a_call_is_replaced_before_anybody_sees_it(
    tools: Environments, family: Family, play: Callable[..., Any], tmp_path: Path
) -> None:
    """``\\ud83d`` alone is valid JSON, and no text: the tool echoes it, and problems quote it."""
    tokenizer = family("qwen2_5")
    echoed = '<tool_call>\n{"name": "greet", "arguments": {"name": "\\ud83d"}}\n</tool_call>'
    unknown = '<tool_call>\n{"name": "\\ud83d", "arguments": {}}\n</tool_call>'
    quoted = '<tool_call>\n{"name": "greet", "arguments": ["\\ud83d"]}\n</tool_call>'
    coder = '<tool_call>\n<function=add>\n<parameter=a>\n"\\ud83d"\n</parameter>\n</function>\n</tool_call>'
    raises = '<tool_call>\n{"name": "fails", "arguments": {"text": "\\ud83d"}}\n</tool_call>'
    written = [echoed, unknown, quoted, coder, raises, "so"]
    episode, engine = play(tokenizer, tools.make, written, task=tools.prepare(TASK), inline=True)
    assert (episode.error, episode.turns) == (None, 6)
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == [
        '{"said": "hello \ufffd"}',
        "Error: there is no tool '\ufffd'; the tools are add, greet, later, fails, leaves, dies, hangs, long",
        'Error: the arguments must be a JSON object, got ["\ufffd"]',
        'Error: TypeError: can only concatenate str (not "int") to str',
        "Error: ValueError: \ufffd",
    ]
    assert episode.messages[1]["tool_calls"][0]["function"]["arguments"] == {"name": "\ufffd"}
    assert "hello" in tokenizer.decode(engine.requests[1].prompt)
    sampled = [t for s in episode.segments for t, mine in zip(s.tokens, s.sampled, strict=True) if mine]
    turns = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in written]
    assert sampled == [i for turn in turns for i in turn]  # what is trained is what was written
    RolloutLog(tmp_path, tokenizer).write(1, [Group(episode.task, [episode])])
    (row,) = pq.read_table(tmp_path / "step-00000001.parquet").to_pylist()
    assert json.loads(row["messages"]) == episode.messages


def test_what_a_tool_itself_returns_is_replaced_too(family: Family, play: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "listing.py").write_text(
        "def listing(folder: str) -> str:\n"
        '    """Names of files.\n\n    Args:\n        folder: where\n    """\n'
        '    return "name-\\udcff.txt"\n'
    )
    tokenizer = family("qwen2_5")
    environments = make_environments("tools", {"tools": [f"{tmp_path / 'listing.py'}:listing"]}, tokenizer)
    try:
        task = environments.prepare(TASK)
        episode, _ = play(tokenizer, environments.make, [call("listing", folder="."), "so"], task=task, inline=True)
    finally:
        environments.close()
    assert (episode.error, episode.turns) == (None, 2)
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == ["name-\ufffd.txt"]


def test_an_answer_that_a_limit_cuts_is_no_end(tools: Environments, family: Family, play: Callable[..., Any]) -> None:
    tokenizer = family("qwen2_5")
    cut, _ = play(tokenizer, tools.make, ["It is three and"], task=tools.prepare(TASK), limits=EpisodeLimits(2, 4096), inline=True)
    assert (cut.turns, cut.cut, cut.truncated) == (1, "length", True)
    turns, _ = play(
        tokenizer, tools.make, [call("add", a=1)], task=tools.prepare(TASK), limits=EpisodeLimits(512, 4096, max_turns=3), inline=True
    )
    assert (turns.turns, turns.cut, turns.truncated) == (3, "turns", True)
    assert turns.info["tool_calls"] == 3.0


def test_calls_beyond_the_limit_of_a_turn_are_not_run(family: Family, play: Callable[..., Any]) -> None:
    tokenizer = family("qwen2_5")
    environments = make(tokenizer, "add", max_calls=1)
    try:
        episode, _ = play(
            tokenizer, environments.make, [call("add", a=1) + call("add", a=2), "so"], task=environments.prepare(TASK), inline=True
        )
    finally:
        environments.close()
    assert [m["content"] for m in episode.messages if m["role"] == "tool"] == ["1", "Error: at most 1 calls are run in one turn"]
    assert episode.info == {"tool_calls": 2.0, "tool_failures": 1.0}


@pytest.mark.parametrize("name", ["llama3_1", "mistral", "smollm2", "qwen3"])
def test_every_family_sees_results_of_good_and_bad_calls(family: Family, name: str, play: Callable[..., Any]) -> None:
    tokenizer = family(name)
    environments = make(tokenizer, "add")
    written = {
        "llama3_1": ('{"name": "add", "parameters": {"a": 40, "b": 2}}', '{"name": "add", "parameters": {'),
        "mistral": ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 40, "b": 2}, "id": "000000000"}]', "[TOOL_CALLS] add 40 2"),
        "smollm2": (call("add", a=40, b=2), "<tool_call>add</tool_call>"),
        "qwen3": (call("add", a=40, b=2), "<tool_call>add</tool_call>"),
    }[name]
    try:
        task = environments.prepare(TASK)
        episode, engine = play(tokenizer, environments.make, [*written, "so"], task=task, inline=True)
    finally:
        environments.close()
    assert (episode.error, episode.turns, episode.cut) == (None, 3, None)
    assert episode.info == {"tool_calls": 2.0, "tool_failures": 1.0}
    prompts = [tokenizer.decode(request.prompt) for request in engine.requests]
    assert '"add"' in prompts[0]
    assert "42" in prompts[1].removeprefix(prompts[0])
    assert "no valid JSON" in prompts[2]
    sampled = [t for s in episode.segments for t, mine in zip(s.tokens, s.sampled, strict=True) if mine]
    turns = [[*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id] for text in (*written, "so")]
    assert sampled == [i for turn in turns for i in turn]


def test_tools_that_a_row_names_itself_are_shown_once(tools: Environments) -> None:
    schemas = tools.prepare(TASK).tools
    assert schemas is not None
    other = {"type": "function", "function": {"name": "other", "description": "d", "parameters": {}}}
    named = Task(0, TASK.messages, None, {}, tools=[schemas[0], other])
    assert tools.prepare(named).tools == [other, *schemas]


# ---- saying what is wrong ---------------------------------------------------------------------------------------------------------


def test_tools_that_cannot_be_used_are_refused(family: Family, tmp_path: Path) -> None:
    tokenizer = family("qwen2_5")
    with pytest.raises(EnvironmentConfigError, match="cannot be described to a model"):
        make(tokenizer, "undescribed")
    with pytest.raises(EnvironmentConfigError, match=r"has no 'ad'; did you mean 'add'\? Classes and functions there: add, greet"):
        make(tokenizer, "ad")
    with pytest.raises(EnvironmentConfigError, match="two tools are called 'add'"):
        make(tokenizer, "add", "add")
    with pytest.raises(EnvironmentConfigError, match="there is no file"):
        make_environments("tools", {"tools": [str(tmp_path / "no.py:f")]}, tokenizer)
    environments = make(tokenizer, "add")
    with pytest.raises(EnvironmentConfigError, match="needs conversations"):
        environments.prepare(Task(0, None, "1 + 2", {}))
    environments.close()
    (tmp_path / "broken.py").write_text("import nothing_of_this_name\n")
    with pytest.raises(EnvironmentConfigError, match="No module named 'nothing_of_this_name'"):
        make_environments("tools", {"tools": [str(tmp_path / "broken.py:f")]}, tokenizer)
