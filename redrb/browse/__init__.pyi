from .browser import Browser as Browser
from .choice import Choice as Choice
from .records import GroupView as GroupView
from .records import Page as Page
from .records import SampleView as SampleView
from .records import TokensView as TokensView
from .records import as_json as as_json
from .tokenizer import Tokenizer as Tokenizer
