"""Reinforcement learning: prompts and tasks, rewards, advantages, and GRPO's loss.

Read completions.py (what is trained on), advantages.py and grpo.py (the loss), then rewards.py.
"""
