"""Adaptive rollout budgets: how deep episodes go and how many a prompt gets, without bending the gradient. See docs/budget.md."""
