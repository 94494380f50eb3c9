-- What became of all groups of a task, for the error of a take whose time is up.
--@include task facts ledger pending

-- Number by name: the ledger of a consumer group; `pool`, the groups that wait in its pool of a status;
-- and `put_ever`, `filtered_ever`: all groups of all producers, also before the consumer group joined.
-- If makers wait for rights to begin groups: `makers_waiting`, and `rights_known`: 1 if there can be any.
local function fates_of(group, pool)
  local ledger, found = ledger_of(group), {}
  ledger.leased = count_leased(group)
  ledger.pool = redis.call('ZCARD', key('ready', pool))
  local ever = put_totals()
  ledger.put_ever, ledger.filtered_ever = ever.put, ever.filtered
  for _, name in ipairs({'put', 'waiting', 'acked', 'expired', 'filtered', 'evicted', 'dead', 'leased',
    'pool', 'put_ever', 'filtered_ever'}) do
    found[name] = ledger[name] or 0
  end
  local makers = redis.call('ZCARD', key('queue', '#admission'))
  if makers > 0 then
    found.makers_waiting = makers
    found.rights_known = rules().groups_per_version and 1 or 0
  end
  return found
end
