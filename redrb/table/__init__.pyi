from .claims import Claim as Claim
from .rows import Rows as Rows
from .table import Restored as Restored
from .table import Table as Table
from .table import TableStats as TableStats
from .table import TagChanges as TagChanges
