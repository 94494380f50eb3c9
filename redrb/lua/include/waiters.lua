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

-- What a waiter needs, its deadline, and whether it was woken; nil if it is not queued or dead.
local function need_of(name, waiter, now)
  local stored = redis.call('HGET', key('needs', name), waiter)
  if stored then
    local need, deadline, woken = string.match(stored, '^(%d+) (%d+) (%d)$')
    if tonumber(deadline) > now then
      return tonumber(need), deadline, woken == '1'
    end
  end
  return nil
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
  local entry = string.format('%.0f %.0f 0', need, now + ttl_ms)
  redis.call('HSET', key('needs', name), waiter, entry)
end

-- The sum of the needs of all waiters before this one, or of all waiters if it is not queued.
local function reserved_before(name, waiter, now)
  local total = 0
  for _, other in ipairs(redis.call('ZRANGE', key('queue', name), 0, -1)) do
    if other == waiter then
      break
    end
    local need = need_of(name, other, now)
    if need then
      total = total + need
    else
      dequeue(name, other)
    end
  end
  return total
end

-- Wake as many waiters as `available` satisfies, first come first served.
local function wake(name, available, now)
  if redis.call('EXISTS', key('queue', name)) == 0 then
    return
  end
  for _, waiter in ipairs(redis.call('ZRANGE', key('queue', name), 0, -1)) do
    local need, deadline, woken = need_of(name, waiter, now)
    if not need then
      dequeue(name, waiter)
    elseif need > available then
      return
    else
      available = available - need
      if not woken then
        send_wake(waiter)
        redis.call('HSET', key('needs', name), waiter, string.format('%.0f %s 1', need, deadline))
      end
    end
  end
end
