-- Queues of waiters, first come first served: consumers of a group wait for groups (queue named
-- like the consumer group), producers for room (queue '#room').
--
-- queue:<name> sorts waiters by their number in the queue; needs:<name> holds of each waiter
-- "<need> <deadline ms> <woken 0|1>". A waiter blocks on the list wake:<waiter>. While it is queued, the
-- groups or the room it needs are reserved for it. A dead waiter is dropped at its deadline.
--@include task

local WAKE_MS = 10000 -- a wake-up that nobody reads is forgotten

local function send_wake(waiter)
  local list = key('wake', waiter)
  redis.call('RPUSH', list, '1')
  redis.call('PEXPIRE', list, WAKE_MS)
end

local function dequeue(name, waiter)
  if redis.call('ZREM', key('queue', name), waiter) == 1 then
    redis.call('HDEL', key('needs', name), waiter)
  end
end

local function enqueue(name, waiter, need, ttl_ms, now)
  local queue = key('queue', name)
  if not redis.call('ZSCORE', queue, waiter) then
    redis.call('ZADD', queue, redis.call('HINCRBY', task, 'queued', 1), waiter)
  end
  local entry = string.format('%d %d 0', need, now + ttl_ms)
  redis.call('HSET', key('needs', name), waiter, entry)
end

-- Keep room that a producer has made for itself: its place is before all others, and nobody wakes it.
local function keep_room(producer, made, ttl_ms, now)
  redis.call('ZADD', key('queue', '#room'), 0, producer)
  redis.call('HSET', key('needs', '#room'), producer, string.format('%d %d 1', made, now + ttl_ms))
end

-- Call `visit` with name, need, deadline and wake-up of each living waiter, in their order, until it
-- returns true. Dead waiters leave the queue.
local function each_waiter(name, now, visit)
  local dead, stop, first, size = {}, false, 0, PAGE.first_waiters
  while not stop and first < PAGE.waiters do -- bound: PAGE.waiters
    local waiters = redis.call('ZRANGE', key('queue', name), first, first + size - 1)
    local needs = #waiters > 0 and redis.call('HMGET', key('needs', name), unpack(waiters)) or {}
    for i, waiter in ipairs(waiters) do
      local need, deadline, woken = string.match(needs[i] or '0 0 0', '^(%d+) (%d+) (%d)$')
      if tonumber(deadline) <= now then
        dead[#dead + 1] = waiter
      else
        stop = visit(waiter, tonumber(need), deadline, woken == '1')
      end
      if stop then
        break
      end
    end
    stop = stop or #waiters < size
    first, size = first + size, PAGE.next_waiters
  end
  for _, waiter in ipairs(dead) do
    dequeue(name, waiter)
  end
end

-- The sum of the needs of the waiters before this one, or of all waiters if it is not queued, or queued
-- for less than it asks for now; once it is more than `enough`, no further waiter is looked at.
local function reserved_before(name, waiter, now, enough, asked)
  local total = 0
  each_waiter(name, now, function(other, need)
    if other == waiter and need >= (asked or 0) or total > enough then
      return true
    end
    total = total + need
  end)
  return total
end

-- Wake as many waiters as `available` satisfies, first come first served.
local function wake(name, available, now)
  each_waiter(name, now, function(waiter, need, deadline, woken)
    if need > available then
      return true
    end
    available = available - need
    if not woken then
      send_wake(waiter)
      redis.call('HSET', key('needs', name), waiter, string.format('%d %s 1', need, deadline))
    end
  end)
end
