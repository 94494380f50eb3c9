-- Evict waiting groups until a put has room. Runs before the put, in the same transaction.
-- KEYS[1] stream
-- ARGV    producer, operation, count, bytes, least, most
--         producer, operation: the put; if it was done already, nothing is evicted
--         count, bytes: groups of the put and their bytes
--         least: evict at least so many, for a server at its memory limit; then history goes first
--         most: evict at most so many beyond `count` and `least`: a lowered limit is reached over
--         several puts
-- Returns {'more' | 'done', entries evicted}: with 'more', there may be others to evict
--@include task capacity candidates eviction puts

begin_writing()
local earlier = redis.call('HGET', puts, ARGV[1])
if not exists() or (earlier and tonumber(string.match(earlier, '^%d+')) >= tonumber(ARGV[2])) then
  return {'done', 0}
end
remove_orphans(number(puts, 'last'), '+') -- no group gives way to them
local limit, max_bytes = number(task, 'limit'), number(task, 'max_bytes')
local excess, excess_bytes, history = tonumber(ARGV[5]), 0, true
if limit > 0 then
  local beyond = stored_groups() + tonumber(ARGV[3]) - limit
  excess, history = math.max(excess, beyond), beyond <= 0
end
if max_bytes > 0 then
  excess_bytes = number(task, 'bytes') + tonumber(ARGV[4]) - max_bytes
end
local most = math.max(tonumber(ARGV[5]), tonumber(ARGV[6]) + tonumber(ARGV[3]))
local evicted = evict(math.min(excess, most), excess_bytes, history)
return {(unseen or excess > most) and 'more' or 'done', evicted}
