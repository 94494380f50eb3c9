from .async_worker import PublishedWeights as PublishedWeights
from .async_worker import TaskRolloutWorker as TaskRolloutWorker
from .rollouts import TaskRollouts as TaskRollouts
from .rollouts import maker_reward as maker_reward
from .rollouts import placeholder_prompts as placeholder_prompts
