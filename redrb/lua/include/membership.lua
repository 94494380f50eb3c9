-- Lets a consumer group join a task.
--@include task facts pools history groups ledger

-- Add the next page of the task's groups to the pools of a consumer group that joins. The hash
-- joining:<group> holds `at`, the place in the facts; `last`, the last id before it joined; `start`.
-- Returns whether this was the last page.
local function join_page(group)
  local at, last, start = unpack(redis.call('HMGET', key('joining', group), 'at', 'last', 'start'))
  if not at then
    return true
  end
  local page, pools, added = redis.call('HSCAN', key('facts'), at, 'COUNT', PAGE.joined), {}, 0
  local history = redis.call('EXISTS', key('archive')) == 1
  start = tonumber(start or '')
  for i = 1, #page[2], 2 do
    local member, facts = page[2][i], unpack_facts(page[2][i + 1])
    local seq, pool = tonumber(member), pool_of(group, facts.status)
    local kept = history and redis.call('ZSCORE', key('archive'), member)
    if seq <= tonumber(last) and (start and seq >= start or not start and not kept)
      and not redis.call('ZSCORE', key('ready', pool), member) then -- a page may come again
      if kept then
        redis.call('ZREM', key('archive'), member)
        count_history({seq}, -1)
        let_evict({seq})
      end
      pools[pool] = pools[pool] or {{}, {}}
      table.insert(pools[pool][1], member)
      table.insert(pools[pool][2], facts)
      added = added + 1
    end
  end
  for pool, found_there in pairs(pools) do
    enter(group, pool, found_there[1], found_there[2])
  end
  add(key('group', group), 'put', added)
  redis.call('HSET', key('joining', group), 'at', page[1])
  if page[1] ~= '0' then
    return false
  end
  redis.call('DEL', key('joining', group))
  return true
end

-- Make sure that a consumer group exists. A new one sees all stored groups, or with `start` the entries
-- from that seq on, history included. They are added a page at a time: returns false if there are more
-- pages, and the script must do nothing else.
local function join(group, start)
  if redis.call('SISMEMBER', key('groups'), group) == 1 then
    return join_page(group)
  end
  --@include unrecorded pending put_record
  check_puts()
  local found = by_name(redis.call('XINFO', 'GROUPS', stream)) -- bound: consumer groups
  if found[group] then -- the names were lost, so all come back
    for name in pairs(found) do -- bound: consumer groups
      redis.call('SADD', key('groups'), name)
    end
    return join_page(group)
  end
  local last = last_counted()
  redis.call('SADD', key('groups'), group)
  redis.call('XGROUP', 'CREATE', stream, group, '0')
  begin_ledger(group)
  if start and start > last then
    return true
  end
  redis.call('HSET', key('joining', group), 'at', '0', 'last', string.format('%d', last))
  if start then
    redis.call('HSET', key('joining', group), 'start', string.format('%d', start))
  end
  return join_page(group)
end
