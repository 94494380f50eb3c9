-- Settings that a task remembers, in the order in which task/open.lua returns them.

local SETTINGS = {'format', 'order', 'limit', 'max_bytes', 'max_deliveries', 'sampled',
  'max_staleness', 'max_token_staleness', 'on_expired', 'max_reads', 'capacity', 'eviction', 'rate',
  'tags', 'keep_ms', 'keep_groups', 'revision'}
