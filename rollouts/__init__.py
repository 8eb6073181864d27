"""Rollouts: engines that sample, environments that answer, and the manager that runs episodes. Import it as `surogate_rl.rollouts`."""

if __name__ == "rollouts":
    raise ImportError("import surogate_rl.rollouts: the top-level folder is a part of that package and cannot be imported as 'rollouts'")
