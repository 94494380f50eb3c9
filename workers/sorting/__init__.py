"""The demo's task, sorting digits: its prompts, reward, policy, maker and trainer."""
