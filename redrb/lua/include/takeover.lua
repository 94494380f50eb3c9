-- Takes the leases of consumers that have ended, or died, from them.
--
-- consumers:<group> holds the deadline of each consumer's heartbeat. The string spared:<group> holds a time:
-- consumers whose deadline was over then live on; it expires.
--@include task heartbeats pending leases

-- Requeue the groups of a consumer that ends, at most `most`. Returns their number, and whether the consumer
-- has ended: else it is called again later.
local function return_leases(group, consumer, failure, most)
  local first, beyond = '[' .. consumer .. '/', '(' .. consumer .. '0' -- '0' is the character after '/'
  local returned, left = 0, most
  local slots = redis.call('ZRANGEBYLEX', key('slots', group), first, beyond, 'LIMIT', 0, PAGE.slots)
  for _, slot in ipairs(slots) do
    if left <= 0 then
      return returned, false
    end
    local found, emptied = return_slot(group, slot, failure, left)
    returned, left = returned + found, left - math.max(found, 1)
    if not emptied then
      return returned, false
    end
    remove_slot(group, slot)
  end
  if #slots == PAGE.slots then
    return returned, false
  end
  redis.call('ZREM', key('consumers', group), consumer)
  -- Every name has a slot, unless a read has created it whose take was not run: a restarted server does not
  -- know the script, and a read may arrive long after its consumer has died. Such names lease nothing.
  -- bound: consumer groups, and where there is such a name, all names of this one
  local groups, unnoted = by_name(redis.call('XINFO', 'GROUPS', stream)), PAGE.unnoted
  if groups[group].consumers > redis.call('ZCARD', key('slots', group)) then
    local names = by_name(redis.call('XINFO', 'CONSUMERS', stream, group)) -- bound: names
    for name, info in pairs(names) do -- bound: names
      if unnoted > 0 and info.pending == 0 and not redis.call('ZSCORE', key('slots', group), name) then
        redis.call('XGROUP', 'DELCONSUMER', stream, group, name)
        unnoted = unnoted - 1
      end
    end
  end
  return returned, true
end

-- Go on with lost leases of which only a part was requeued: at most `most` groups. Returns their number.
local function return_rest(group, most)
  local found, returned = redis.call('HRANDFIELD', key('returning', group), PAGE.slots, 'WITHVALUES'), 0
  for i = 1, #found, 2 do
    if returned < most then
      returned = returned + return_slot(group, found[i], cmsgpack.unpack(found[i + 1]), most - returned)
    end
  end
  return returned
end

-- Take the leases of consumers from them whose deadline is over: `dead` is a flat list consumer, deadline. If
-- the caller's deadline was over too, all deadlines are renewed instead: most likely Redis was away. Some
-- groups are requeued in one call. Returns their number, and whether there is more to do.
local function take_over(group, dead, deadline, lease_ms, now)
  if deadline and tonumber(deadline) <= now then
    redis.call('SET', key('spared', group), string.format('%.0f', now), 'PX', lease_ms)
  end
  local spared, left = tonumber(redis.call('GET', key('spared', group)) or '0'), PAGE.taken_over
  local more = #dead == 2 * PAGE.dead_consumers
  for i = 1, #dead, 2 do
    if tonumber(dead[i + 1]) <= spared then
      redis.call('ZADD', key('consumers', group), string.format('%.0f', now + lease_ms), dead[i])
    elseif left > 0 then
      local found, ended = return_leases(group, dead[i], {consumer = dead[i]}, left)
      left, more = left - found, more or not ended
    else
      more = true
    end
  end
  if left > 0 and redis.call('EXISTS', key('returning', group)) == 1 then
    left = left - return_rest(group, left)
    more = more or redis.call('EXISTS', key('returning', group)) == 1
  end
  add(key('group', group), 'taken_over', PAGE.taken_over - left)
  return PAGE.taken_over - left, more
end

-- Renew a consumer's deadline, and take over. Returns the number of groups requeued, the consumer's old
-- deadline, if it had one, and whether there is more to do.
local function beat(group, consumer, lease_ms, now)
  local deadline, dead = renew(group, consumer, lease_ms, now)
  local returned, more = take_over(group, dead, deadline, lease_ms, now)
  return returned, deadline, more
end
