"""Data sets into tasks for rollouts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from surogate_rl.data.convert import Converter, Prompt
from surogate_rl.data.detect import CHAT_COLUMNS, detect
from surogate_rl.data.report import (
    PROMPT_LIMIT,
    DataError,
    DataReport,
    DatasetReport,
    Loaded,
    UnusableRow,
    require_embedded,
    require_usable,
)
from surogate_rl.data.sources import open_source
from surogate_rl.data.template import ChatTemplate, require_chat_template
from surogate_rl.data.tokens import Tokens
from surogate_rl.rollouts.types import Task

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from surogate_rl.config.schema import DatasetConfig

BATCH = 256
REFERENCE = "reference"


def load_tasks(
    datasets: Sequence[DatasetConfig],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int | None,
    vocab: int | None = None,
    seed: int = 0,
    prepare: Callable[[Task], Task] | None = None,
) -> Loaded[Task]:
    """Tasks in the order of data sets and rows; prompts longer than `max_prompt_length` tokens are filtered out and counted. Every id of
    the others must be below `vocab`, the rows of the model's embedding.

    Conversations are cut after the last message that is not the assistant's. Every other column goes to the rewards; an answer that the
    row itself holds (`completion`, or the assistant's last message) is their column ``reference``, since ``completion`` is the policy's.
    reasoning_gym rows have the columns ``question``, ``answer``, ``metadata``, ``entry`` (the whole entry, for `score_answer`) and
    ``reasoning_gym`` ({task, args}).

    `prepare` adds to a task what its environment shows to the policy, such as tools, before its prompt is measured.

    `Task.index` counts rows over all data sets, filtered ones too, so that it is unique.

    Raises:
        MissingData: a local path that is not there.
        DataError: a malformed row (named), a token that the model does not have, rows of no usable type, or a data set of which nothing
            is left.
    """
    tokens, template = Tokens(tokenizer), ChatTemplate(tokenizer)
    tasks: list[Task] = []
    reports = []
    offset = 0
    for config in datasets:
        source = open_source(config, seed)
        row_type = detect(source, config.type, "grpo")
        convert = Converter(row_type, label=source.label, chat=bool(tokenizer.chat_template), system_prompt=config.system_prompt)
        report = DatasetReport(config.path, row_type)
        rows = iter(enumerate(source))
        while batch := list(islice(rows, BATCH)):
            report.rows += len(batch)
            made: list[tuple[Task, tuple[int, ...], str]] = []
            for index, row in batch:
                where = source.where(index)
                prompt = convert.prompt(row, where)
                task = Task(offset + index, prompt.messages, prompt.text, _columns(row, prompt), prompt.tools)
                if prepare is not None:
                    task = prepare(task)
                try:
                    made.append((task, *_rendered(task, tokens, template)))
                except UnusableRow as error:
                    report.add_unusable(where, str(error))
            tokens.prefetch(text for _, _, text in made)
            for task, prefix, text in made:
                ids, where = [*prefix, *tokens.ids(text)], source.where(task.index - offset)
                length = len(ids)
                if length == 0:
                    raise DataError(f"{where}: its prompt has no tokens")
                if max_prompt_length is not None and length > max_prompt_length:
                    report.overlong += 1
                    continue
                require_embedded(ids, vocab, where, tokenizer)
                report.kept += 1
                report.items += 1
                report.tokens += length
                tasks.append(task)
        require_usable(report, PROMPT_LIMIT, max_prompt_length, "prompt")
        reports.append(report)
        offset += len(source)
    return Loaded(tasks, DataReport(tuple(reports)))


def _rendered(task: Task, tokens: Tokens, template: ChatTemplate) -> tuple[tuple[int, ...], str]:
    if task.messages is None:
        assert task.prompt is not None
        return tokens.plain(task.prompt)
    require_chat_template(tokens.tokenizer)
    return (), template.render(task.messages, task.tools, generation_prompt=True)


def _columns(row: Mapping[str, Any], prompt: Prompt) -> dict[str, Any]:
    taken = {"prompt", "completion", "tools", *CHAT_COLUMNS}
    columns = {name: value for name, value in row.items() if name not in taken}
    if prompt.reference is not None:
        columns.setdefault(REFERENCE, prompt.reference)
    return columns
