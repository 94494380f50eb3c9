-- Consumer groups begin and end.

-- Make sure that the consumer group exists. A new one sees all that is stored, or with `start` the
-- entries from that seq on, also those that are only kept as history.
local function join(group, start)
  if redis.call('SADD', key('groups'), group) == 0 then
    return
  end
  redis.call('XGROUP', 'CREATE', stream, group, '0')
  local state = key('group', group)
  if rules().indexed then
    local members, facts, pools = {}, {}, {}
    for _, member in ipairs(redis.call('HKEYS', key('facts'))) do
      local archived = redis.call('ZSCORE', key('archive'), member)
      if start and tonumber(member) >= start or not start and not archived then
        if archived then
          redis.call('ZREM', key('archive'), member)
          if tonumber(member) < number(task, 'floor') then -- to be evicted like any other
            redis.call('HSET', task, 'floor', string.format('%.0f', tonumber(member)))
          end
        end
        local own = facts_of(member)
        local pool = pool_of(group, own[STATUS])
        if not pools[pool] then
          pools[pool] = {{}, {}}
        end
        table.insert(pools[pool][1], member)
        table.insert(pools[pool][2], own)
        members[#members + 1] = member
      end
    end
    for pool, found in pairs(pools) do
      enter(group, pool, found[1], found[2])
    end
    redis.call('HSET', state, 'cursor', string.format('%.0f', number(task, 'last')),
      'put', #members, 'waiting', #members)
    left_unread(group, number(task, 'put') - #members) -- what it never finds
    return
  end
  local cursor = number(task, 'last')
  local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  if first then
    cursor = seq_of(first[1]) - 1
  end
  local stored = redis.call('XLEN', stream)
  if start and start > number(task, 'last') then
    cursor, stored = number(task, 'last'), 0
  end
  redis.call('HSET', state, 'cursor', string.format('%.0f', cursor),
    'put', stored, 'waiting', stored)
end

-- Delete all that belongs to a consumer group.
local function drop_keys(group)
  for _, kind in ipairs({'group', 'deliveries', 'consumers', 'leases', 'moved', 'expiries', 'reads', 'clock',
    'mass', 'staleness'}) do
    redis.call('DEL', key(kind, group))
  end
  for _, status in ipairs(STATUSES) do
    local pool = pool_of(group, status)
    for _, kind in ipairs({'ready', 'versions', 'newest', 'queue', 'needs'}) do
      redis.call('UNLINK', key(kind, pool))
      redis.call('DEL', key(kind, pool .. '?'))
    end
    for _, name in ipairs(rules().names) do
      redis.call('UNLINK', key('tag', pool .. ':' .. name))
    end
  end
end
