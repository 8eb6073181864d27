"""Where rows come from: the Hugging Face hub, local files and directories, reasoning_gym.

Rows are plain dicts. Local JSON is read here and not through `datasets`, which hides the line of a mistake and fills absent keys with None.
Nothing here needs the network when the data is local.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_rl.config.paths import WHERE
from surogate_rl.data.report import DataError, MissingData
from surogate_rl.files import user_path

if TYPE_CHECKING:
    import datasets as hf

    from surogate_rl.config.schema import DatasetConfig

Row = dict[str, Any]

FILE_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".csv")
GYM_PREFIX = "reasoning_gym/"
GYM_DEFAULT_SIZE = 500
SPLIT_NAMES = ("train", "test", "validation", "valid", "val", "dev", "eval")


@dataclass
class Source:
    """Rows of one data set, readable more than once.

    Attributes:
        label: what to call the data set in messages.
        columns: names of the columns of any row, ours after renaming.
        kind: ``gym`` for reasoning_gym, else ``rows``.
    """

    label: str
    columns: list[str]
    rows: Sequence[Row]
    kind: str = "rows"
    _where: Callable[[int], str] | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def where(self, index: int) -> str:
        """How messages name row `index` (from 0): ``file:line`` where there are lines."""
        return self._where(index) if self._where else f"{self.label} row {index} (counted from 0)"


def open_source(config: DatasetConfig, seed: int) -> Source:
    """Opens the data set that `config` names, cut to `size` and with `columns` renamed.

    Args:
        seed: of generated rows, where `config` has none.

    Raises:
        MissingData: a local path that is not there.
        DataError: everything else, naming file and line, data set, split or column.
    """
    source = _reasoning_gym(config, seed) if config.path.startswith(GYM_PREFIX) else _stored(config)
    if config.args and source.kind != "gym":
        raise DataError(f"{config.path}: `args` are the arguments of a reasoning_gym task; this data set takes none")
    return _renamed(source, config.columns)


def _stored(config: DatasetConfig) -> Source:
    path = user_path(config.path)
    if path.is_file():
        source = _read_files([path], str(config.path))
        return _sliced(source, config, "train")
    if path.is_dir():
        return _directory(path, config)
    if path.suffix.lower() in FILE_SUFFIXES or path.is_absolute() or config.path.startswith(("./", "../", "~")):
        raise MissingData(f"datasets: no such file or directory: {config.path} (looked for {path.absolute()}); {WHERE}")
    return _hub(config)


# ---- local files -----------------------------------------------------------------------------------------------------------------


def _read_files(paths: Sequence[Path], label: str) -> Source:
    rows: list[Row] = []
    places: list[tuple[int, Path, list[int] | None]] = []  # first row, file, line of each row
    for path in paths:
        suffix = path.suffix.lower()
        read = _READERS.get(suffix)
        if read is None:
            raise DataError(f"{path}: cannot read files of type '{suffix}'; known types: {', '.join(FILE_SUFFIXES)}")
        new, lines = read(path)
        places.append((len(rows), path, lines))
        rows.extend(new)

    def where(index: int) -> str:
        first, path, lines = next(place for place in reversed(places) if place[0] <= index)
        return f"{path}:{lines[index - first]}" if lines else f"{path} row {index - first} (counted from 0)"

    return Source(label, _columns_of(rows), rows, _where=where)


def _columns_of(rows: Iterable[Row]) -> list[str]:
    seen: dict[str, None] = {}
    for row in rows:
        seen.update(dict.fromkeys(row))
    return list(seen)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: not UTF-8 text (byte {error.start}); convert the file to UTF-8") from None


def _read_jsonl(path: Path) -> tuple[list[Row], list[int] | None]:
    return _parse_lines(_read_text(path), path)


def _parse_lines(text: str, path: Path) -> tuple[list[Row], list[int]]:
    rows, lines = [], []
    # not splitlines(): it also breaks at U+2028 and the like, which JSON allows inside strings
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}:{number}: not valid JSON: {error.msg} at column {error.colno}; every line must be one JSON object"
            ) from None
        except RecursionError:
            raise DataError(f"{path}:{number}: lists or objects within each other too deeply to be read") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}:{number}: a row must be a JSON object, this line holds {_kind(row)}")
        rows.append(row)
        lines.append(number)
    return rows, lines


def _read_json(path: Path) -> tuple[list[Row], list[int] | None]:
    text = _read_text(path)
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        # many files called .json hold one object per line
        if text.lstrip().startswith("{") and error.msg == "Extra data":
            return _parse_lines(text, path)
        raise DataError(f"{path}:{error.lineno}: not valid JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise DataError(f"{path}: lists or objects within each other too deeply to be read") from None
    if isinstance(value, dict):
        if len(lists := [v for v in value.values() if isinstance(v, list)]) == 1 and len(value) == 1:
            value = lists[0]
        else:
            return [value], None
    if not isinstance(value, list):
        raise DataError(f"{path}: must hold a list of JSON objects, holds {_kind(value)}")
    for index, row in enumerate(value):
        if not isinstance(row, dict):
            raise DataError(f"{path} row {index} (counted from 0): a row must be a JSON object, this one is {_kind(row)}")
    return value, None


def _read_csv(path: Path) -> tuple[list[Row], list[int] | None]:
    rows, lines = [], []
    _read_text(path)  # for the message about encodings
    previous_limit = csv.field_size_limit(2**31 - 1)  # long documents are ordinary here
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"{path}:{reader.line_num}: the header has {len(reader.fieldnames or [])} columns, this line has another number"
                    )
                rows.append(dict(row))
                lines.append(reader.line_num)
    except csv.Error as error:
        raise DataError(f"{path}: not valid CSV: {error}") from None
    finally:
        csv.field_size_limit(previous_limit)
    return rows, lines


def _read_parquet(path: Path) -> tuple[list[Row], list[int] | None]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path).to_pylist(), None
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as Parquet: {error}") from None


_READERS: Mapping[str, Callable[[Path], tuple[list[Row], list[int] | None]]] = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
}


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    return {dict: "an object", list: "a list", str: "a string", bool: "a truth value"}.get(type(value), "a number")


def _directory(path: Path, config: DatasetConfig) -> Source:
    if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
        return _saved(path, config)
    # data repositories keep their files in the top folder or in data/
    folders = [folder for folder in (path, path / "data") if folder.is_dir()]
    files = [file for folder in folders for file in sorted(folder.iterdir()) if file.suffix.lower() in FILE_SUFFIXES]
    if not files:
        raise DataError(f"{path}: no data files in this directory; known types: {', '.join(FILE_SUFFIXES)}, or one written by save_to_disk")
    name = config.split.split("[", 1)[0]
    by_split: dict[str, list[Path]] = {}
    for file in files:
        by_split.setdefault(next((s for s in SPLIT_NAMES if _is_split(file, s)), ""), []).append(file)
    chosen = [f for f in files if _is_split(f, name)] or (by_split.get("", []) if name == "train" else [])
    if not chosen:
        raise DataError(f"{path}: no files of split '{name}'; there are {', '.join(f.name for f in files[:8])}")
    return _sliced(_read_files(chosen, config.path), config, name)


def _is_split(file: Path, split: str) -> bool:
    rest = file.stem[len(split) :]
    return file.stem.startswith(split) and (not rest or rest[0] in "-_.")


def _sliced(source: Source, config: DatasetConfig, split: str) -> Source:
    """Applies a slice such as ``train[:80%]`` and `size`."""
    first, last = 0, len(source)
    if config.split != split:
        import datasets as hf

        try:
            wanted = hf.ReadInstruction.from_spec(config.split).to_absolute({split: len(source)})
        except (ValueError, AssertionError) as error:
            raise DataError(f"{config.path}: split '{config.split}' does not exist; these files are split '{split}' ({error})") from None
        if len(wanted) != 1:
            raise DataError(f"{config.path}: split '{config.split}' must be one slice of '{split}'")
        first, last = wanted[0].from_, wanted[0].to
    if config.size is not None:
        last = min(last, first + config.size)
    if (first, last) == (0, len(source)):
        return source
    return Source(source.label, source.columns, source.rows[first:last], source.kind, _where=lambda index: source.where(first + index))


# ---- datasets --------------------------------------------------------------------------------------------------------------------


class _TableRows(Sequence[Row]):
    """Rows of a `datasets.Dataset`, read in blocks and never all in memory."""

    BLOCK = 1000

    def __init__(self, dataset: hf.Dataset) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return _TableRows(self._dataset.select(range(*index.indices(len(self)))))
        return self._dataset[index]

    def __iter__(self) -> Iterator[Row]:
        for first in range(0, len(self), self.BLOCK):
            block = self._dataset[first : first + self.BLOCK]
            names = list(block)
            for values in zip(*block.values(), strict=True):
                yield dict(zip(names, values, strict=True))


def _table(dataset: hf.Dataset, config: DatasetConfig) -> Source:
    if config.size is not None and config.size < len(dataset):
        dataset = dataset.select(range(config.size))
    return Source(config.path, list(dataset.column_names), _TableRows(dataset))


def _saved(path: Path, config: DatasetConfig) -> Source:
    import datasets as hf

    saved = hf.load_from_disk(str(path))
    if isinstance(saved, hf.DatasetDict):
        name = config.split.split("[", 1)[0]
        if name not in saved:
            raise DataError(f"{config.path}: split '{config.split}' does not exist; there are {', '.join(saved)}")
        saved = saved[name]
    else:
        name = "train"
    table = Source(config.path, list(saved.column_names), _TableRows(saved))
    return _sliced(table, config, name)


def _hub(config: DatasetConfig) -> Source:
    import datasets as hf

    try:
        loaded = hf.load_dataset(config.path, config.name, split=config.split)
    except Exception as error:  # the library raises many kinds for one cause: it is not there, or cannot be reached
        first = str(error).strip().split("\n")[0]
        which = f"{f'name {config.name!r}, ' if config.name else ''}split '{config.split}'"
        raise DataError(
            f"datasets: cannot load '{config.path}' ({which}) from the Hugging Face hub: {type(error).__name__}: {first}; "
            f"it is no local path either (looked for {Path(config.path).absolute()})"
        ) from error
    return _table(loaded, config)


# ---- reasoning_gym ---------------------------------------------------------------------------------------------------------------


def _reasoning_gym(config: DatasetConfig, seed: int) -> Source:
    import dataclasses

    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise DataError(f"{config.path}: the package reasoning-gym is not installed ({error}); run: pip install reasoning-gym") from error

    task = config.path[len(GYM_PREFIX) :]
    if task not in DATASETS:
        near = get_close_matches(task, DATASETS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"known tasks: {', '.join(sorted(DATASETS))}"
        raise DataError(f"{config.path}: reasoning_gym has no task '{task}'; {hint}")
    if config.split != "train":
        raise DataError(f"{config.path}: generated rows have no split '{config.split}'; use another `seed` for held-out rows")
    for reserved in ("size", "seed"):
        if reserved in config.args:
            raise DataError(f"{config.path}: `{reserved}` belongs beside `args`, not in it")
    known = [f.name for f in dataclasses.fields(DATASETS[task][1]) if f.name not in ("size", "seed")]
    if unknown := [name for name in config.args if name not in known]:
        raise DataError(f"{config.path}: unknown argument {', '.join(map(repr, unknown))}; the task takes {', '.join(known)}")
    size = config.size if config.size is not None else GYM_DEFAULT_SIZE
    chosen_seed = config.seed if config.seed is not None else seed
    try:
        dataset = create_dataset(task, **gym_arguments(task, config.args), size=size, seed=chosen_seed)
    except Exception as error:  # arguments are checked by asserts of every kind
        raise DataError(f"{config.path}: the task refuses its arguments {config.args}: {type(error).__name__}: {error}") from error
    description = {"task": task, "args": dict(config.args)}
    rows = [
        {
            "question": entry["question"],
            "answer": entry["answer"],
            "metadata": entry["metadata"],
            "entry": entry,
            "reasoning_gym": description,
        }
        for entry in (dataset[i] for i in range(size))
    ]
    return Source(config.path, list(rows[0]), rows, kind="gym")


def gym_arguments(task: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments for `reasoning_gym.create_dataset` from those of the YAML, which has no classes: ``composite`` wants its parts as
    `DatasetSpec`, given as ``{name, weight, config}``."""
    made = dict(args)
    if task == "composite" and "datasets" in made:
        from reasoning_gym.composite import DatasetSpec

        made["datasets"] = [
            DatasetSpec(name=part["name"], weight=part.get("weight", 1.0), config=part.get("config", {})) for part in made["datasets"]
        ]
    return made


# ---- columns ---------------------------------------------------------------------------------------------------------------------


class _RenamedRows(Sequence[Row]):
    def __init__(self, rows: Sequence[Row], columns: Mapping[str, str]) -> None:
        self._rows = rows
        self._columns = columns

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        return _RenamedRows(self._rows[index], self._columns) if isinstance(index, slice) else self._rename(self._rows[index])

    def __iter__(self) -> Iterator[Row]:
        return map(self._rename, self._rows)

    def _rename(self, row: Row) -> Row:
        taken = set(self._columns.values()) | set(self._columns)
        renamed = {name: value for name, value in row.items() if name not in taken}
        renamed.update({ours: row[theirs] for ours, theirs in self._columns.items() if theirs in row})
        return renamed


def _renamed(source: Source, columns: Mapping[str, str]) -> Source:
    if not columns:
        return source
    for ours, theirs in columns.items():
        if theirs not in source.columns:
            raise DataError(
                f"{source.label}: there is no column '{theirs}' (from `columns: {{{ours}: {theirs}}}`); "
                f"the columns are {', '.join(source.columns)}"
            )
    taken = set(columns.values()) | set(columns)
    names = [name for name in source.columns if name not in taken] + list(columns)
    return Source(source.label, names, _RenamedRows(source.rows, columns), source.kind, _where=source._where)
