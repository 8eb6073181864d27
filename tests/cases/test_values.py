"""Right values, worked out by hand or with a reference (values.json), against the code that runs. Tolerance 1e-5 unless an entry says so.

Every entry of the file needs a check here, and every check reads all that its entry holds: what is added to the file and not checked fails.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import Fuse
from tokenizers.models import BPE, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

import surogate_rl
from surogate_rl import _core
from surogate_rl.batch import NO_TARGET, PackedBatch, Totals
from surogate_rl.config import ConfigError, DatasetConfig, RewardConfig, load_config, parse_config
from surogate_rl.data import PackSequence, load_examples, pack
from surogate_rl.learner import Learner
from surogate_rl.models.family import weight_shapes
from surogate_rl.models.load import describe
from surogate_rl.models.rope import make_rope
from surogate_rl.models.tokenizer import find_stop_ids
from surogate_rl.objectives import NegativeLogLikelihood, Preference, group_advantages, seeds, totals_of
from surogate_rl.rewards import RewardError, RewardRunner, load_rewards
from surogate_rl.rollouts.conversation import Conversation, Dialect, Said
from surogate_rl.rollouts.engines.native import NativeEngine
from surogate_rl.rollouts.manager import Group
from surogate_rl.rollouts.types import Completion, Episode, GenerateRequest, SamplingParams, Segment, Task
from surogate_rl.trainers.grpo import trained_sequences
from surogate_rl.trainers.schedule import Schedule

VALUES: dict[str, Any] = json.loads(Path(__file__).with_name("values.json").read_text())
TINY = Path(__file__).resolve().parents[2] / "examples" / "quickstart" / "tiny"
TOLERANCE = 1e-5


class Entry(Mapping[str, Any]):
    """One entry of the file, which remembers what was read of it."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self.unread = set(values)

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        self.unread.discard(key)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


def entries() -> dict[str, Entry]:
    """Every entry by name, such as ``dpo[1]``, ``rope.llama3``, ``schedule``."""
    found: dict[str, Entry] = {}
    for section, content in VALUES.items():
        if section == "_":
            continue
        if isinstance(content, list):
            found |= {f"{section}[{index}]": Entry(entry) for index, entry in enumerate(content)}
        elif section == "rope":
            found |= {f"rope.{key}": Entry(value if isinstance(value, dict) else {"value": value}) for key, value in content.items()}
        else:
            found[section] = Entry(content)
    return found


Check = Callable[[Entry, Path], None]
CHECKS: dict[str, Check] = {}


def check(name: str) -> Callable[[Check], Check]:
    """Names the entry that a function checks. The function gets the entry and an empty folder."""

    def register(function: Check) -> Check:
        assert name not in CHECKS
        CHECKS[name] = function
        return function

    return register


@pytest.mark.parametrize("name", sorted(entries()))
def test_entry(name: str, tmp_path: Path) -> None:
    assert name in CHECKS, f"{name} of values.json has no check"
    entry = entries()[name]
    CHECKS[name](entry, tmp_path)
    assert not entry.unread, f"the check of {name} leaves out {', '.join(sorted(entry.unread))}"


def test_no_check_outlives_its_entry() -> None:
    assert set(CHECKS) == set(entries())


# ---- a small model -----------------------------------------------------------------------------------------------------------------


def small_model() -> tuple[_core.ModelSpec, list[tuple[str, np.ndarray]]]:
    """The model of the packing entry."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 2,
        "vocab_size": 32,
    }
    config = Qwen3Config(**sizes, intermediate_size=96, max_position_embeddings=64, tie_word_embeddings=False)
    model = Qwen3ForCausalLM(config)
    _, fields = describe(config, config.to_dict(), "qwen3")
    weights = [(name.removeprefix("model."), value.detach().numpy()) for name, value in model.named_parameters()]
    return _core.ModelSpec(**fields), weights


def make_learner() -> Learner:
    spec, weights = small_model()
    learner = Learner(spec, max_tokens=64, threads=1)
    learner.load_weights(iter(weights))
    return learner


def row(tokens: Sequence[int], trained: Sequence[int], number: int = 0) -> PackSequence:
    """`trained`: places of the tokens that are trained."""
    return PackSequence(tokens=tokens, mask=[place in trained for place in range(len(tokens))], id=number)


# ---- normalisation -----------------------------------------------------------------------------------------------------------------


@check("normalisation")
def normalisation(entry: Entry, _: Path) -> None:
    objective = NegativeLogLikelihood()
    token_losses: list[list[float]] = entry["token_losses"]
    long, short = [1, 2, 3, 4, 5], [6, 7]
    assert [len(losses) for losses in token_losses] == [len(long) - 1, len(short) - 1]
    whole = [[row(long, [1, 2, 3, 4])], [row(short, [1], 1)]]
    parts = [[row(long, [1, 2])], [row(long, [3])], [row(long, [4])], [row(short, [1], 1)]]  # the same tokens in four micro-batches
    cuts: dict[str, list[list[PackedBatch]]] = {  # of each rank its micro-batches
        "one batch": [pack(whole, 16)],
        "2 micro-batches": [[*pack(whole[:1], 16), *pack(whole[1:], 16)]],
        "2 ranks": [pack(whole[:1], 16), pack(whole[1:], 16)],
        "3 + 1 micro-batches over 2 ranks": [[batch for part in parts[:3] for batch in pack([part], 16)], pack(parts[3:], 16)],
    }
    assert [len(rank) for rank in cuts["3 + 1 micro-batches over 2 ranks"]] == [3, 1]
    assert set(entry["holds_for"]) == set(cuts)
    loss_of = {
        token: loss
        for sequence, losses in ((long, token_losses[0]), (short, token_losses[1]))
        for token, loss in zip(sequence[1:], losses, strict=True)
    }
    gradients: dict[str, dict[str, np.ndarray]] = {}
    for name, ranks in cuts.items():
        totals = sum((totals_of(objective, rank) for rank in ranks), Totals(0, 0))
        batches = [batch for rank in ranks for batch in rank]
        given = [np.array([-loss_of.get(int(target), 0.0) for target in batch.targets], np.float32) for batch in batches]
        losses = [seeds(objective, logp, None, batch, totals).loss for logp, batch in zip(given, batches, strict=True)]
        assert sum(losses) == pytest.approx(entry["loss"], abs=TOLERANCE), name
        gradients[name] = {}
        for rank in ranks:  # each has a learner of its own; ranks sum
            learner = make_learner()
            for batch in rank:
                learner.forward_backward(batch, objective.known_seeds(batch, totals))
            for info in learner.tensors():
                gradients[name][info.name] = gradients[name].get(info.name, 0) + learner.gradient(info.name)
    for name, mine in gradients.items():
        for tensor, value in mine.items():
            np.testing.assert_allclose(value, gradients["one batch"][tensor], atol=entry["gradients_equal_to"], err_msg=f"{name}: {tensor}")
    assert any(np.abs(value).max() > 1e-3 for value in gradients["one batch"].values())


# ---- packing -----------------------------------------------------------------------------------------------------------------------


def all_logps(learner: Learner, batch: PackedBatch, vocab: int) -> np.ndarray:
    """[T, vocab]: logits but for a constant."""
    columns = []
    for token in range(vocab):
        targets = np.full(batch.num_tokens, token, np.int32)
        columns.append(learner.native.score(batch.tokens, batch.positions, batch.cu_seqlens, targets)[0])
    return np.stack(columns, axis=1)


@check("packing")
def packing(entry: Entry, _: Path) -> None:
    spec, _weights = small_model()
    described = (
        f"Qwen3, random, seed 0: hidden {spec.hidden}, heads {spec.heads}/{spec.kv_heads}, head_dim {spec.head_dim}, {spec.layers} layers"
    )
    assert entry["model"] == f"{described}, vocab {spec.vocab}"
    learner = make_learner()

    def packed(*segments: Sequence[int]) -> PackedBatch:
        (batch,) = pack([[row(tokens, range(1, len(tokens)), number)] for number, tokens in enumerate(segments)], 16)
        return batch

    first, second = entry["segments"]
    together = packed(first, second)
    assert together.num_trained == entry["trained_targets"]
    assert (together.targets != NO_TARGET).sum() == entry["trained_targets"]
    ours = all_logps(learner, together, spec.vocab)[len(first) :]
    alone = all_logps(learner, packed(second), spec.vocab)
    np.testing.assert_allclose(ours, alone, atol=entry["second_segment_logits_equal_unpacked_to"])
    changed = all_logps(learner, packed([token + 7 for token in first], second), spec.vocab)[len(first) :]
    assert (not np.array_equal(changed, ours)) is entry["changing_segment_1_moves_segment_2"]


# ---- stop --------------------------------------------------------------------------------------------------------------------------


@check("stop[0]")
def labels_by_position(entry: Entry, folder: Path) -> None:
    """The row as text through the data code; padding that looks like the end is never made, and the end itself is trained."""
    ids, prompt, length = entry["ids"], entry["prompt_length"], entry["true_length"]
    vocabulary = {f"w{number}": number for number in range(16)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=word_level(vocabulary), eos_token=f"w{entry['pad']}", pad_token=f"w{entry['pad']}")
    assert [tokenizer.eos_token_id] == entry["eos"]
    words = [f"w{number}" for number in ids]
    rows = {"prompt": " ".join(words[:prompt]) + " ", "completion": " ".join(words[prompt : length - 1])}
    (folder / "rows.jsonl").write_text(json.dumps(rows) + "\n")
    (example,) = load_examples([DatasetConfig(path=str(folder / "rows.jsonl"))], tokenizer, sequence_len=16).items
    (batch,) = pack([[PackSequence(tokens=example.tokens, mask=example.mask)]], 16)
    assert batch.tokens.tolist() == ids[:length]
    labels = [NO_TARGET, *np.where(batch.mask, batch.targets, NO_TARGET)[:-1].tolist()]  # of a token itself, not of the one before it
    assert labels + [NO_TARGET] * (len(ids) - length) == entry["labels"]


def word_level(vocabulary: dict[str, int]) -> Tokenizer:
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return tokenizer


@check("stop[1]")
def any_of_several_ends(entry: Entry, _: Path) -> None:
    """A model that says exactly the completion, whatever comes: embeddings are unit vectors, the head maps each token to the next."""
    completion, first = entry["completion"], 9
    vocab = 16
    spec = _core.ModelSpec(
        layers=1, hidden=vocab, heads=1, kv_heads=1, head_dim=16, ffn=16, vocab=vocab, max_positions=32, rope_inv_freq=[1.0] * 8
    )
    learner = Learner(spec, max_tokens=32, threads=1, trainable=False)
    for info in learner.tensors():
        learner.load(info.name, (np.ones if len(info.shape) == 1 else np.zeros)(info.shape, np.float32))
    learner.load("embed_tokens.weight", np.eye(vocab, dtype=np.float32))
    head = np.zeros((vocab, vocab), np.float32)
    for before, after in zip([first, *completion], completion, strict=False):
        head[after, before] = 50.0
    learner.load("lm_head.weight", head)
    # one id from the config, one from the generation config
    eos = entry["eos"]
    tokenizer = SimpleNamespace(eos_token_id=None, chat_template=None)
    stop = find_stop_ids(SimpleNamespace(eos_token_id=eos[0]), SimpleNamespace(eos_token_id=eos[1:]), tokenizer, vocab)  # type: ignore[arg-type]

    async def ask() -> Any:
        engine = NativeEngine(learner, max_sequences=1, cache_tokens=32)
        try:
            return await engine.generate(GenerateRequest([first], SamplingParams(max_tokens=len(completion), stop_ids=stop, seed=1)))
        finally:
            await engine.close()

    answer = asyncio.run(ask())
    sampled = len(answer.tokens)
    assert answer.tokens == completion[:sampled]
    assert [int(place < sampled) for place in range(len(completion))] == entry["mask"]
    assert (answer.finish_reason == "length") is entry["truncated"]


# ---- multi_turn ------------------------------------------------------------------------------------------------------------------

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if loop.last or m.role == 'user' else m.content.split('</think>')[-1] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@check("multi_turn")
def several_turns(entry: Entry, _: Path) -> None:
    assert entry["template"] == "<|role|>content<|end|>, think text dropped unless last"
    tokenizer = chat_tokenizer()
    question, thought, farewell = entry["turns"]
    assert entry["rule"] == "sampled ids kept, then the ids of <|user|>bye<|end|><|assistant|>, or a new segment"
    delta = tokenizer("<|user|>bye<|end|><|assistant|>").input_ids

    # nothing to drop: the ids go on behind what was sampled
    plain = tokenizer("A").input_ids
    conversation = played(tokenizer, question, plain, farewell)
    (segment,) = conversation.segments
    end = tokenizer.convert_tokens_to_ids("<|end|>")
    assert conversation.context == [*segment.tokens, *delta]
    assert segment.tokens[-len(plain) - 1 :] == [*plain, end]

    # thinking is dropped from the turn once another follows: what was sampled stays one segment, what follows begins another
    conversation = played(tokenizer, question, tokenizer(thought).input_ids, farewell)
    (segment,) = conversation.segments
    assert [token for token, mine in zip(segment.tokens, segment.sampled, strict=True) if mine] == [*tokenizer(thought).input_ids, end]
    assert conversation.context == tokenizer("<|user|>hi<|end|><|assistant|>A<|end|><|user|>bye<|end|><|assistant|>").input_ids

    # a sampler's own spelling of a text
    assert entry["non_canonical"] == "a sampler that emits [a][b] where the tokenizer would give [ab]: ids stay [a][b]"
    a, b, ab = (tokenizer.convert_tokens_to_ids(token) for token in ("a", "b", "ab"))
    assert tokenizer("ab").input_ids == [ab]
    conversation = played(tokenizer, question, [a, b], farewell)
    assert conversation.context[-len(delta) - 3 :] == [a, b, end, *delta]


def played(tokenizer: PreTrainedTokenizerFast, question: str, sampled: list[int], farewell: str) -> Conversation:
    """The policy says `sampled` and ends its turn; the user answers."""
    dialect = Dialect(tokenizer)
    messages = [{"role": "user", "content": question}]
    ids = tokenizer(dialect.prompt(messages, None)).input_ids
    conversation = Conversation(lambda: dialect, messages, "", ids, None)
    tokens = [*sampled, tokenizer.convert_tokens_to_ids("<|end|>")]
    text = tokenizer.decode(sampled)
    conversation.say(Completion(tokens, [-1.0] * len(tokens), "stop", [0] * len(tokens)), Said(text, text, "<|end|>"), 0)
    conversation.answer(None, [{"role": "user", "content": farewell}])
    return conversation


def chat_tokenizer() -> PreTrainedTokenizerFast:
    """Letters are tokens, and `ab` is one more."""
    letters = sorted({*"abexhiytnkA<>/"})
    backend = Tokenizer(BPE({token: number for number, token in enumerate([*letters, "ab"])}, [("a", "b")]))
    backend.decoder = Fuse()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|end|>", clean_up_tokenization_spaces=False)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


# ---- advantages --------------------------------------------------------------------------------------------------------------------


@check("advantages[0]")
def group_of_four(entry: Entry, _: Path) -> None:
    rewards = entry["rewards"]
    (ours,) = group_advantages([rewards]).values
    np.testing.assert_allclose(ours, entry["advantages"], atol=TOLERANCE)
    deviation = np.std(rewards, ddof={"sample": 1}[entry["std"]])
    np.testing.assert_allclose(ours, (np.array(rewards) - np.mean(rewards)) / (deviation + entry["eps"]), atol=TOLERANCE)


@check("advantages[1]")
def equal_rewards(entry: Entry, _: Path) -> None:
    assert entry["advantages"] == "exactly 0"
    for scale in ("group", "batch", "none"):
        (ours,) = group_advantages([entry["rewards"]], scale_rewards=scale).values
        assert not ours.any()


def config(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "output_dir": "out", "datasets": ["rows.jsonl"], "rewards": ["exact_match"], **changes}


@check("advantages[2]")
def group_of_one(entry: Entry, _: Path) -> None:
    assert entry["result"] == "config error"
    with pytest.raises(ConfigError, match=r"rollouts\.num_generations: a group of one has no baseline"):
        parse_config(config(rollouts={"num_generations": entry["group_size"]}), "grpo")


# ---- rewards -----------------------------------------------------------------------------------------------------------------------


def completions(count: int, text: str = "x") -> list[Episode]:
    segment = Segment([1, 2, 3], [False, True, True], [0.0, -1.0, -1.0], [-1, 0, 0])
    return [Episode(Task(0, None, "Q", {}), number, 0, [segment], completion=text) for number in range(count)]


def score(runner: RewardRunner, episodes: Sequence[Episode]) -> list[float | None]:
    asyncio.run(runner.score(episodes))
    return [episode.reward for episode in episodes]


@check("rewards[0]")
def wrong_length(entry: Entry, _: Path) -> None:
    returned = entry["returns"]

    def single(completions: list[str]) -> list[float]:
        return list(returned)

    assert entry["result"] == "ValueError naming the function"
    with load_rewards([single]) as runner, pytest.raises(ValueError, match=r"reward 'single' returned 1 reward, expected 4") as caught:
        score(runner, completions(entry["for_completions"]))
    assert isinstance(caught.value, RewardError)


@check("rewards[1]")
def unscored_rows(entry: Entry, _: Path) -> None:
    scores = entry["scores"]

    def given(completions: list[str]) -> list[float | None]:
        return list(scores)

    episodes = completions(len(scores))
    with load_rewards([given]) as runner:
        assert score(runner, episodes) == scores
        mean = runner.report().functions["given"].mean
    assert mean == pytest.approx(entry["mean_over_scored"], abs=TOLERANCE)
    (total, count) = group_advantages([scores]).metrics["reward"]
    assert total / count == pytest.approx(entry["mean_over_scored"], abs=TOLERANCE)
    trained = {sample for _, sample in trained_sequences([Group(episodes[0].task, episodes)])}
    assert (scores.index(None) in trained) is entry["unscored_row_trained"]
    assert len(trained) == len(scores) - 1


@check("rewards[2]")
def none_does_not_apply(entry: Entry, _: Path) -> None:
    values = entry["functions"]

    def f(completion: str) -> Any:
        return values["f"]

    def g(completion: str) -> Any:
        return values["g"]

    (episode,) = completions(1)
    with load_rewards([f, g]) as runner:
        assert score(runner, [episode]) == [entry["reward"]]
    assert episode.rewards == values


@check("rewards[3]")
def hanging_pattern(entry: Entry, _: Path) -> None:
    assert entry["text"] == "'a' * 40 + 'b'"
    episodes = completions(1, "a" * 40 + "b")
    regex = RewardConfig(name="regex", args={"pattern": entry["pattern"]}, timeout=entry["deadline_s"])
    with load_rewards([regex], workers=1) as runner:
        before = runner.worker_pids()
        start = time.monotonic()
        assert score(runner, episodes) == [None]
        assert time.monotonic() - start < entry["returns_within_s"]
        pids = [*before, *runner.worker_pids()]
    assert len([pid for pid in set(pids) if alive(pid)]) == entry["worker_left"]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


# ---- dpo ---------------------------------------------------------------------------------------------------------------------------


def pair_loss(
    objective: Preference, policy: Sequence[float], reference: Sequence[float], lengths: Sequence[int]
) -> tuple[float, np.ndarray]:
    """Loss and gradient by position for answers of so many tokens; each side's log-probability is spread evenly over them."""
    sides = [
        PackSequence(
            tokens=[1, *range(2, 2 + length)],
            mask=[False] + [True] * length,
            per_sequence={"reference_logp_sum": reference[side]},
            pair=0,
            id=side,
        )
        for side, length in enumerate(lengths)
    ]
    (batch,) = pack([sides], 64)
    logp = np.where(batch.mask, np.repeat([policy[0] / lengths[0], policy[1] / lengths[1]], [lengths[0] + 1, lengths[1] + 1]), 0.0)
    result = seeds(objective, logp.astype(np.float32), None, batch, totals_of(objective, [batch]))
    return result.loss, result.dlogp


@check("dpo[0]")
def dpo_sigmoid(entry: Entry, _: Path) -> None:
    loss, _dlogp = pair_loss(Preference(entry["loss_type"], entry["beta"]), entry["policy"], entry["reference"], (3, 2))
    assert loss == pytest.approx(entry["loss"], abs=TOLERANCE)


@check("dpo[1]")
def dpo_ipo(entry: Entry, _: Path) -> None:
    loss, _dlogp = pair_loss(Preference(entry["loss_type"], entry["beta"]), entry["policy"], entry["reference"], entry["lengths"])
    assert loss == pytest.approx(entry["loss"], abs=TOLERANCE)


@check("dpo[2]")
def dpo_identical(entry: Entry, _: Path) -> None:
    """The gradient of the weights: that of the two sides by token is not 0, and cancels because they are the same tokens."""
    assert entry["pair"] == "chosen == rejected"
    learner = make_learner()
    sides = [
        PackSequence([1, 2, 3, 4], [False, False, True, True], {"reference_logp": [0.0, 0.0, -3.0, -4.0]}, pair=0, id=k) for k in (0, 1)
    ]
    (batch,) = pack([sides], 16)
    objective = Preference()
    result = seeds(objective, learner.forward(batch).logp, None, batch, totals_of(objective, [batch]))
    learner.backward(result.dlogp)
    assert result.loss == pytest.approx(entry["loss"], abs=TOLERANCE)
    assert np.abs(result.dlogp).max() > 0.01
    for info in learner.tensors():
        np.testing.assert_allclose(learner.gradient(info.name), entry["gradient"], atol=1e-7, err_msg=info.name)


# ---- yaml --------------------------------------------------------------------------------------------------------------------------

BASE = "model: m\noutput_dir: out\ndatasets: [rows.jsonl]\n"


def load(folder: Path, line: str) -> Any:
    (folder / "config.yaml").write_text(BASE + line)
    return load_config(folder / "config.yaml", "sft")


@check("yaml[0]")
def number_with_exponent(entry: Entry, folder: Path) -> None:
    assert load(folder, f"learning_rate: {entry['learning_rate']}\n").learning_rate == entry["value"]


@check("yaml[1]")
def number_with_capital_exponent(entry: Entry, folder: Path) -> None:
    assert load(folder, f"learning_rate: {entry['learning_rate']}\n").learning_rate == entry["value"]


@check("yaml[2]")
def misspelt_key(entry: Entry, folder: Path) -> None:
    assert entry["result"] == "error that suggests learning_rate, with file and line"
    with pytest.raises(ConfigError) as caught:
        load(folder, f"{entry['key']}: 1e-5\n")
    assert str(caught.value) == f"{folder}/config.yaml:4: unknown key '{entry['key']}'; did you mean 'learning_rate'?"


@check("yaml[3]")
def duplicate_key(entry: Entry, folder: Path) -> None:
    assert entry["duplicate key"] == "error"
    with pytest.raises(ConfigError, match=r":5: duplicate key 'seed'; it is already on line 4, remove one of them$"):
        load(folder, "seed: 1\nseed: 1\n")


# ---- schedule ----------------------------------------------------------------------------------------------------------------------


@check("schedule")
def schedule(entry: Entry, folder: Path) -> None:
    rates = entry["linear"]
    ours = Schedule("linear", entry["peak"], entry["warmup"], entry["total"])
    np.testing.assert_allclose([ours(update) for update in range(entry["total"])], rates, atol=TOLERANCE)
    assert entry["for"] == "any accumulation, any rank count"
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"{n:02}=", "completion": f"{n:02}"}) + "\n" for n in range(40)))
    for accumulation in (1, 4):
        peak = 1e-4
        run = surogate_rl.sft(
            {
                "model": str(TINY),
                "init": "random",
                "output_dir": str(folder / f"run-{accumulation}"),
                "datasets": [str(folder / "rows.jsonl")],
                "sequence_len": 16,
                "packing": False,
                "per_device_train_batch_size": 2,
                "gradient_accumulation_steps": accumulation,
                "learning_rate": peak * entry["peak"],
                "warmup_steps": entry["warmup"],
                "max_steps": entry["total"],
                "save_steps": 0,
                "threads": 1,
            }
        )
        np.testing.assert_allclose([line["learning_rate"] / peak for line in run.history], rates, atol=TOLERANCE)


# ---- rope --------------------------------------------------------------------------------------------------------------------------


@check("rope.llama3")
def rope_llama3(entry: Entry, _: Path) -> None:
    scaled = {
        "rope_type": "llama3",
        "rope_theta": entry["theta"],
        "factor": entry["factor"],
        "low_freq_factor": entry["low"],
        "high_freq_factor": entry["high"],
        "original_max_position_embeddings": entry["original"],
    }
    plain = {"rope_type": "default", "rope_theta": entry["theta"]}
    ours, base = (make_rope(kind, head_dim=entry["dim"], max_positions=131072).inv_freq for kind in (scaled, plain))
    for index, ratio in entry["scaled_over_base_inv_freq"].items():
        assert ours[int(index)] / base[int(index)] == pytest.approx(ratio, abs=TOLERANCE)


@check("rope.theta_1e6_dim_128_inv_freq_1")
def rope_theta(entry: Entry, _: Path) -> None:
    rope = make_rope({"rope_type": "default", "rope_theta": 1e6}, head_dim=128, max_positions=4096)
    assert rope.inv_freq[1] == pytest.approx(entry["value"], abs=TOLERANCE)


@check("rope.head_dim")
def rope_head_dim(entry: Entry, _: Path) -> None:
    """A head_dim of its own, other than hidden / heads."""
    made = Qwen3Config(
        hidden_size=entry["hidden"],
        num_attention_heads=entry["heads"],
        head_dim=entry["head_dim"],
        num_key_value_heads=2,
        num_hidden_layers=1,
    )
    _, fields = describe(made, made.to_dict(), "qwen3")
    shapes = weight_shapes(fields)
    assert list(shapes["layers.0.self_attn.q_proj.weight"]) == entry["q_weight"]
    assert list(shapes["layers.0.self_attn.o_proj.weight"]) == entry["o_weight"]
    learner = {name: list(shape) for name, shape, _ in _core.Learner(_core.ModelSpec(**fields), max_tokens=8, threads=1).tensors()}
    assert learner["layers.0.self_attn.q_proj.weight"] == entry["q_weight"]
    assert learner["layers.0.self_attn.o_proj.weight"] == entry["o_weight"]
