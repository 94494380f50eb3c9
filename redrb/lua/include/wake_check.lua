-- Whether the groups that have arrived let nobody go on who waits.
--@include task pools

-- Whether no take of a pool without a query can go on: the one that waits first is alive and needs more.
local function need_more(pool, now)
  local first = redis.call('ZRANGE', key('queue', pool), 0, 0)[1]
  if not first then
    return true
  end
  local need = redis.call('HGET', key('needs', pool), first) or '0 0 0'
  local groups, deadline = string.match(need, '^(%d+) (%d+)')
  return tonumber(deadline) > now and tonumber(groups) > redis.call('ZCARD', key('ready', pool))
end

-- Whether a put lets nobody go on who waits.
local function wakes_nobody(now)
  local others = {key('queue', '#room')}
  for pool in pairs(entered) do
    others[#others + 1] = key('queries', pool)
    if not need_more(pool, now) then
      return false
    end
  end
  return redis.call('EXISTS', unpack(others)) == 0
end
