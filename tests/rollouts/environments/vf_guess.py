"""An environment for the package verifiers, as its documentation says to write one."""

import verifiers as vf


class Guess(vf.MultiTurnEnv):
    async def setup_state(self, state):
        state["tries"] = 0
        return state

    async def env_response(self, messages, state, **kwargs):
        state["tries"] += 1
        if state["tries"] == 7:
            raise OSError("the board is lost")
        return [{"role": "user", "content": f"no ({state['tries']})"}]

    @vf.stop
    async def guessed(self, state):
        last = state["trajectory"][-1]["completion"][-1] if state["trajectory"] else None
        return last is not None and state["input"]["answer"] in (last.content or "")


def load_environment(max_turns=-1, system_prompt=None):
    async def right(completion, answer):
        said = completion[-1]
        content = said.content if hasattr(said, "content") else said["content"]
        return 1.0 if answer in (content or "") else 0.0

    async def turns(state):
        return float(len(state["trajectory"]))

    rows = [{"prompt": [{"role": "user", "content": "?"}], "answer": "1"}]
    try:
        from datasets import Dataset

        dataset = Dataset.from_list(rows)
    except ImportError:
        dataset = rows
    return Guess(
        max_turns=max_turns, rubric=vf.Rubric(funcs=[right, turns], weights=[1.0, 0.1]), system_prompt=system_prompt, dataset=dataset
    )
