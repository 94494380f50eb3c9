from .episodes import EpisodeRecipe as EpisodeRecipe
from .groups import Completion as Completion
from .language import GRPORecipe as GRPORecipe
from .language import PPORecipe as PPORecipe
from .pretrained import character_tokenizer as character_tokenizer
from .recipe import Prompt as Prompt
from .recipe import Recipe as Recipe
from .settings import option as option
