-- What follows when groups have arrived.
--@include task clock facts pools

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

-- Make the room that a capacity asks for, and wake the takes and puts that can go on.
local function make_known(producer, count, now)
  local rule = rules()
  if rule.capacity > 0 then -- a capacity that was given later is reached over several puts
    --@include capacity eviction
    evict(math.min(stored_groups() - rule.capacity, 50 + count), 0)
  end
  local queues = {key('queue', '#room')}
  for pool in pairs(entered) do
    queues[#queues + 1], queues[#queues + 2] = key('queue', pool), key('queries', pool)
  end
  if redis.call('EXISTS', unpack(queues)) == 0 then
    return
  end
  now = now or now_ms()
  if rule.rate or not wakes_nobody(now) then
    --@include waking waiters capacity
    dequeue('#room', producer)
    wake_room(now)
    if rule.rate then -- it may now allow takes of all statuses
      for _, group in ipairs(groups()) do
        wake_pools(group, now)
      end
    else
      wake_entered(now)
    end
  end
end
