-- Account for entries that the same transaction has just added, or take them out again.
-- Runs in MULTI after n times XADD stream NOMKSTREAM * g <group>.
-- KEYS[1] stream
-- ARGV    producer, operation, samples, bytes of each entry ...
--         operation counts up by one a put of this producer: a repeated one is not stored again;
--         room that was granted to the producer is used up
-- Returns {'ok', last seq, room left} | {'again', last seq, entries stored then} | {'full', setting} | {'never'} | {'gone'}
--         setting: limit | max_bytes, whichever leaves no room
--@ _task _waiters _room

begin_writing()
if not exists() then
  return {'gone'}
end
local producer, operation, count = ARGV[1], tonumber(ARGV[2]), #ARGV - 3
local before = number(task, 'last')
local last = before + count
redis.call('HSET', task, 'last', string.format('%.0f', last))

local function undo()
  for seq = before + 1, last do
    redis.call('XDEL', stream, id_of(seq))
  end
end

local earlier = redis.call('HGET', key('producers'), producer)
if earlier then
  local done, at, entries = string.match(earlier, '^(%d+) (%d+) (%d+)$')
  if tonumber(done) >= operation then
    undo()
    return {'again', tonumber(at), tonumber(entries)}
  end
end

local now = now_ms()
local limit, max_bytes = number(task, 'limit'), number(task, 'max_bytes')
local bytes = 0
for i = 4, #ARGV do
  bytes = bytes + tonumber(ARGV[i])
end
if (limit > 0 and count > limit) or (max_bytes > 0 and bytes > max_bytes) then
  undo()
  return {'never'}
end

local excess = 0
if limit > 0 then
  excess = redis.call('XLEN', stream) + reserved_before('#room', producer, now) - limit
end
if excess > 0 or (max_bytes > 0 and number(task, 'bytes') + bytes > max_bytes) then
  undo()
  return {'full', excess > 0 and 'limit' or 'max_bytes'}
end

dequeue('#room', producer)
redis.call('HSET', key('producers'), producer, 
  string.format('%.0f %.0f %.0f', operation, last, count))
add(task, 'put', count)
add(task, 'samples_put', tonumber(ARGV[3]))
add(task, 'bytes_put', bytes)
if max_bytes > 0 then
  for i = 1, count do
    redis.call('HSET', key('sizes'), string.format('%.0f', before + i), ARGV[3 + i])
  end
  add(task, 'bytes', bytes)
end
for _, group in ipairs(groups()) do
  local state = key('group', group)
  redis.call('HINCRBY', state, 'put', count)
  wake(group, redis.call('HINCRBY', state, 'waiting', count), now)
end
local left = room_left()
if left == math.huge then
  left = -1
else
  wake('#room', left, now)
end
return {'ok', last, left}
