"""Recipes: a whole job, of models, prompts and reward, in one class, which workers run.

`import redrb.recipe` imports no torch, so that commands can read a recipe's settings at once.
"""

from redrb.options import option
from redrb.recipe.completion import Completion
from redrb.recipe.grpo import GRPORecipe
from redrb.recipe.ppo import PPORecipe
from redrb.recipe.recipe import Prompt, Recipe

__all__ = ["Completion", "GRPORecipe", "PPORecipe", "Prompt", "Recipe", "option"]
