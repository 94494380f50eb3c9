from .characters import character_tokenizer as character_tokenizer
from .episodes import EpisodeRecipe as EpisodeRecipe
from .grpo import GRPORecipe as GRPORecipe
from .ppo import PPORecipe as PPORecipe
from .recipe import Prompt as Prompt
from .recipe import Recipe as Recipe
from .sampling import Completion as Completion
from .settings import option as option
