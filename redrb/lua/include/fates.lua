-- What became of all groups of a task, for the error of a take whose time is up.
--@include task ledger pending

-- Name, number, ...: the ledger of a consumer group; `pool`, the groups that wait in its pool of a status;
-- and `put_ever`, `filtered_ever`: all groups of all producers, also before the consumer group joined.
local function fates_of(group, pool)
  local ledger, found = ledger_of(group), {}
  ledger.leased = count_leased(group)
  ledger.pool = redis.call('ZCARD', key('ready', pool))
  local ever = put_totals()
  ledger.put_ever, ledger.filtered_ever = ever.put, ever.filtered
  for _, name in ipairs({'put', 'waiting', 'acked', 'expired', 'filtered', 'evicted', 'dead', 'leased',
    'pool', 'put_ever', 'filtered_ever'}) do
    found[#found + 1] = name
    found[#found + 1] = string.format('%d', ledger[name] or 0)
  end
  return found
end
