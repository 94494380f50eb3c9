-- What became of all groups of a task, for the error of a take whose time is up.
--@include task facts ledger pending

-- Number by name: the ledger of a consumer group; `pool`, the groups that wait in its pool of a status;
-- and `put_ever`, `filtered_ever`, `expired_ever`: all groups of all producers, also before the consumer
-- group joined. If makers wait for rights to begin groups: `makers_waiting`, and `rights_known`: 1 if there
-- can be any. If makers hold rights: `rights_held`; if groups wait for parts: `parts_waiting`. If groups were
-- too stale when they arrived: `stale_version`, that of the last such put, and `version`, the newest one.
local function fates_of(group, pool)
  local ledger, found = ledger_of(group), {}
  ledger.leased = count_leased(group)
  ledger.pool = redis.call('ZCARD', key('ready', pool))
  local ever = put_totals()
  ledger.put_ever, ledger.filtered_ever, ledger.expired_ever = ever.put, ever.filtered, ever.expired
  for _, name in ipairs({'put', 'waiting', 'acked', 'expired', 'filtered', 'evicted', 'dead', 'leased',
    'pool', 'put_ever', 'filtered_ever', 'expired_ever'}) do
    found[name] = ledger[name] or 0
  end
  local makers = redis.call('ZCARD', key('queue', '#admission'))
  if makers > 0 then
    found.makers_waiting = makers
    found.rights_known = rules().groups_per_version and 1 or 0
  end
  local parts = redis.call('ZCARD', key('part_due'))
  found.parts_waiting = parts > 0 and parts or nil
  local held, stale = redis.call('ZCARD', key('rights')), redis.call('HGET', task, 'stale_version')
  found.rights_held = held > 0 and held or nil
  if stale and rules().version then
    found.stale_version, found.version = tonumber(stale), rules().version
  end
  return found
end
