from .async_worker import PublishedWeights as PublishedWeights
from .async_worker import TaskRolloutWorker as TaskRolloutWorker
from .placeholders import placeholder_prompts as placeholder_prompts
from .rollouts import TaskRollouts as TaskRollouts
from .rollouts import maker_reward as maker_reward
