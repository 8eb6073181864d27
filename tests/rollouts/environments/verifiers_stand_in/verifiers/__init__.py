"""What an adapter touches of verifiers 0.1 to 0.3, for machines without the package: same names, same calls, nothing else.

Where the package is installed the tests run against it instead.
"""

import importlib
from types import SimpleNamespace

from verifiers import clients, types  # noqa: F401


def load_environment(env_id, **arguments):
    return importlib.import_module(env_id.replace("-", "_")).load_environment(**arguments)


def stop(function):
    function.stop = True
    return function


class Rubric:
    def __init__(self, funcs=None, weights=None):
        self.funcs, self.weights = list(funcs or []), list(weights or [1.0] * len(funcs or []))

    async def score_rollout(self, state):
        given = {"prompt": state["prompt"], "completion": state["completion"], "answer": state["input"].get("answer"), "state": state}
        scores = [
            await function(**{k: given[k] for k in function.__code__.co_varnames[: function.__code__.co_argcount]})
            for function in self.funcs
        ]
        state["reward"] = sum(score * weight for score, weight in zip(scores, self.weights, strict=True))


class MultiTurnEnv:
    tool_defs = None
    requires_group_rollouts = False

    def __init__(self, max_turns=-1, rubric=None, system_prompt=None, dataset=None):
        self.max_turns, self.rubric, self.system_prompt = max_turns, rubric or Rubric(), system_prompt

    async def setup_state(self, state):
        return state

    async def is_completed(self, state):
        if len(state["trajectory"]) >= self.max_turns > 0:
            state["stop_condition"] = "max_turns_reached"
            return True
        for name in dir(self):
            condition = getattr(self, name)
            if getattr(condition, "stop", False) and await condition(state):
                state["stop_condition"] = name
                return True
        return state.get("final_env_response") is not None

    async def get_prompt_messages(self, state):
        if not state["trajectory"]:
            return state["prompt"]
        last = state["trajectory"][-1]
        messages = [*last["prompt"], *last["completion"]]
        return [*messages, *map(types.message, await self.env_response(messages, state))]

    async def render_completion(self, state):
        last = state["trajectory"][-1] if state["trajectory"] else {"prompt": state["prompt"], "completion": []}
        state["completion"] = [*last["prompt"], *last["completion"]][len(state["prompt"]) :]

    async def rollout(self, input, client, model, sampling_args=None):
        state = {"input": input, "prompt": [types.message(m) for m in input["prompt"]], "trajectory": [], "error": None}
        state["final_env_response"] = None
        await self.setup_state(state)
        while not await self.is_completed(state):
            prompt = await self.get_prompt_messages(state)
            if state["final_env_response"] is not None:
                continue
            response = await client.get_response(prompt=prompt, model=model, sampling_args=sampling_args or {}, tools=None, state=state)
            said = SimpleNamespace(**{**vars(response.message), "role": "assistant"})
            state["trajectory"].append({"prompt": prompt, "completion": [types.Message(said)]})
        await self.render_completion(state)
        return state
