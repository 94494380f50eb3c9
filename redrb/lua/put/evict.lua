-- Evict waiting groups until a put has room. Runs before the put, in the same transaction.
-- KEYS[1] stream
-- ARGV    producer, operation, epoch, count, bytes, least, most
--         producer, operation, epoch: the put; if it was done already, or may have been, nothing is
--         evicted
--         count, bytes: groups of the put and their bytes
--         least: evict at least so many, for a server at its memory limit; then history goes first
--         most: evict at most so many, or `count` or `least` if that is more: a lowered limit is reached
--         over several calls
-- Returns {'more' | 'done', entries evicted}: with 'more', there may be others to evict
--@include task counted clock capacity candidates eviction epochs puts waiters permissions

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
local producer, count, least, now = ARGV[1], tonumber(ARGV[4]), tonumber(ARGV[6]), now_ms()
local earlier, epoch = unpack(redis.call('HMGET', puts, producer, 'epoch'))
local done = earlier and tonumber(string.match(earlier, '^%d+')) >= tonumber(ARGV[2])
if not exists() or done or (not earlier and may_be_forgotten(ARGV[3], epoch)) then
  return {'done', 0}
end
remove_orphans(last_counted(), '+') -- no group gives way to them
local limit, max_bytes = number(task, 'limit'), number(task, 'max_bytes')
local excess, excess_bytes, history, free, own = least, 0, true, 0, 0
local queued = limit > 0 and redis.call('EXISTS', key('queue', '#room')) == 1
if limit > 0 then
  free = limit - stored_groups()
  local missing = count - free
  if queued then
    own = own_places(producer, free, now)
    missing = math.max(missing, count - own)
  end
  excess, history = math.max(excess, missing), missing <= 0
end
if max_bytes > 0 then
  excess_bytes = number(task, 'bytes') + tonumber(ARGV[5]) - max_bytes
end
local most = math.max(least, tonumber(ARGV[7]), count)
local evicted, short = evict(excess, excess_bytes, history, most)
if queued and evicted > 0 then
  own = own + math.max(limit - stored_groups(), 0) - math.max(free, 0)
  if own > 0 then
    keep_room(producer, math.min(own, count), KEPT_MS, now)
  end
end
return {(unseen or short) and 'more' or 'done', evicted}
