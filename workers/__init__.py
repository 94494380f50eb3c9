"""The demo's workers: maker and trainer processes, and the task, policy and PPO that they run."""
