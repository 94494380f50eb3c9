-- Evict waiting groups until a put has room. Runs before the put, in the same transaction.
-- KEYS[1] stream
-- ARGV    the call `Evict` of redrb/stream/put/calls.py
-- Returns its reply
--@include task put_record clock candidates eviction epochs puts waiters permissions

-- Room that is free may be reserved for producers that wait. The put evicts as many groups as it needs, and
-- the room that it has made is kept for it: it stands first in the queue, without having waited.
local KEPT_MS = 3000

-- How many of the `free` places a producer need not share: those that it has made, or those that nobody
-- waits for.
local function own_places(producer, free, now)
  if tonumber(redis.call('ZSCORE', key('queue', '#room'), producer) or '') == 0 then
    local kept = redis.call('HGET', key('needs', '#room'), producer)
    local made, deadline = string.match(kept, '^(%d+) (%d+)')
    if tonumber(deadline) > now then
      return math.max(math.min(tonumber(made), free), 0)
    end
  end
  return math.max(free - reserved_before('#room', producer, now, free), 0)
end

check_permissions(KEYS[1])
begin_writing()
local ask, now = cmsgpack.unpack(ARGV[1]), now_ms()
local producer, count, least = ask.producer, ask.groups, ask.least
local earlier, epoch = unpack(redis.call('HMGET', puts, producer, 'epoch'))
local done = earlier and tonumber(string.match(earlier, '^%d+')) >= ask.operation
if not exists() or done or (not earlier and may_be_forgotten(ask.epoch, epoch)) then
  return cmsgpack.pack({found = 0})
end
remove_orphans(last_counted(), '+') -- no group gives way to them
local limit, max_bytes = number(task, 'limit'), number(task, 'max_bytes')
local excess, excess_bytes, free, own = least, 0, 0, 0
local queued = limit > 0 and redis.call('EXISTS', key('queue', '#room')) == 1
if limit > 0 then
  free = limit - redis.call('XLEN', stream)
  local missing = count - free
  if queued then
    own = own_places(producer, free, now)
    missing = math.max(missing, count - own)
  end
  excess = math.max(excess, missing)
end
if max_bytes > 0 then
  excess_bytes = number(task, 'bytes') + ask.nbytes - max_bytes
end
local most = math.max(least, ask.most, count)
local evicted, short = evict(excess, excess_bytes, most, ask.stalest)
if queued and evicted > 0 then
  own = own + math.max(limit - redis.call('XLEN', stream), 0) - math.max(free, 0)
  if own > 0 then
    keep_room(producer, math.min(own, count), KEPT_MS, now)
  end
end
return cmsgpack.pack({found = evicted, more = (unseen or short) and true or false})
