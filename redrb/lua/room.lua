-- Queue for room; whoever is woken asks again.
-- KEYS[1] stream
-- ARGV    producer, count, ttl_ms    ttl_ms 0 leaves the queue
-- Returns how many of `count` entries may be put now (kept for the producer until ttl_ms), or 0.
--@ _task _waiters _room

begin_writing()
local producer, count, ttl_ms, now = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), now_ms()
if ttl_ms == 0 or not exists() then
  dequeue('#room', producer)
  wake('#room', room_left(), now)
  return count
end
local granted = math.min(count, room_left() - reserved_before('#room', producer, now))
enqueue('#room', producer, math.max(granted, 1), ttl_ms, now)
return math.max(granted, 0)
