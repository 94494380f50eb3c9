-- Lets a consumer group join a task.
--@include task facts pools ledger

-- Add the next page of the task's groups to the pools of a consumer group that joins. The hash
-- joining:<group> holds `at`, the place in the facts, and `last`, the last id before it joined. Returns
-- whether this was the last page.
local function join_page(group)
  local at, last = unpack(redis.call('HMGET', key('joining', group), 'at', 'last'))
  if not at then
    return true
  end
  local page, pools, added = redis.call('HSCAN', key('facts'), at, 'COUNT', PAGE.joined), {}, 0
  for i = 1, #page[2], 2 do
    local member, facts = page[2][i], unpack_facts(page[2][i + 1])
    local pool = pool_of(group, facts.status)
    if tonumber(member) <= tonumber(last)
      and not redis.call('ZSCORE', key('ready', pool), member) then -- a page may come again
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

-- Make sure that a consumer group exists. A new one sees all stored groups, or only later ones if it is to
-- begin with the `newest`. They are added a page at a time: returns false if there are more pages, and the
-- script must do nothing else.
local function join(group, newest)
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
  if newest then
    return true
  end
  redis.call('HSET', key('joining', group), 'at', '0', 'last', string.format('%d', last))
  return join_page(group)
end
