-- Evict the oldest entries that wait and are not leased, until a put has room.
-- Runs in the same transaction as that put, before it.
-- KEYS[1] stream
-- ARGV    producer, operation, count, bytes, least
--         of the put; nothing is evicted when it was done already
--         least: evict at least so many, for a server at its memory limit
-- Returns the number of entries evicted.
--@ _task _room _groups

begin_writing()
local earlier = redis.call('HGET', key('producers'), ARGV[1])
if not exists() or (earlier and tonumber(string.match(earlier, '^%d+')) >= tonumber(ARGV[2])) then
  return 0
end
local limit, max_bytes = number(task, 'limit'), number(task, 'max_bytes')
local excess, excess_bytes, last = tonumber(ARGV[5]), 0, number(task, 'last')
if limit > 0 then
  excess = math.max(excess, redis.call('XLEN', stream) + tonumber(ARGV[3]) - limit)
end
if max_bytes > 0 then
  excess_bytes = number(task, 'bytes') + tonumber(ARGV[4]) - max_bytes
end
if excess <= 0 and excess_bytes <= 0 then
  return 0
end

-- candidates: entries that came back, and those that some group was never given
local all, cursors, returned, seen = groups(), {}, {}, {}
local fresh = last + 1
for _, group in ipairs(all) do
  cursors[group] = number(key('group', group), 'cursor')
  fresh = math.min(fresh, cursors[group] + 1)
  for _, member in ipairs(redis.call('ZRANGE', key('ready', group), 0, -1)) do
    if not seen[member] then
      seen[member] = true
      returned[#returned + 1] = tonumber(member)
    end
  end
end
table.sort(returned)
if #all == 0 then
  local first = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
  fresh = first and seq_of(first[1]) or fresh
end

local function evict(seq)
  local waits = {}
  for _, group in ipairs(all) do
    if seq > cursors[group] or redis.call('ZSCORE', key('ready', group), member_of(seq)) then
      waits[#waits + 1] = group
    elseif is_leased(group, seq) then
      return
    end
  end
  local bytes_before = number(task, 'bytes')
  if (#waits == 0 and #all > 0) or delete({seq}) == 0 then
    return
  end
  excess = excess - 1
  excess_bytes = excess_bytes - (bytes_before - number(task, 'bytes'))
  add(task, 'evicted', 1)
  for _, group in ipairs(waits) do
    redis.call('ZREM', key('ready', group), member_of(seq))
    redis.call('HDEL', key('deliveries', group), member_of(seq))
    add(key('group', group), 'waiting', -1)
    add(key('group', group), 'evicted', 1)
  end
end

local before, index = redis.call('XLEN', stream), 1
while (excess > 0 or excess_bytes > 0) and (returned[index] or fresh <= last) do
  if returned[index] and returned[index] <= fresh then
    evict(returned[index])
    index = index + 1
  else
    evict(fresh)
    fresh = fresh + 1
  end
end
return before - redis.call('XLEN', stream)
