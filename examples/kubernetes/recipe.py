"""The recipe that the pods of this folder run: sorting, with a setting of its own."""

from redrb.recipe.examples.sorting import Sorting


class Mine(Sorting):
    """Sorts digits."""

    group_size = 8
