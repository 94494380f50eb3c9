-- Count entries that the same transaction has just added to a plain task, or take them out again.
-- Runs in MULTI after n times XADD stream NOMKSTREAM * g <group>.
-- KEYS[1] stream
-- ARGV    producer, operation, samples, filtered, bytes of each entry ...
--         operation: counts up by one a put of this producer; a repeated put is not stored again
--         samples: number of samples in all entries
--         filtered: groups that a filter dropped
-- Returns {'ok', last seq, room left}: room left is -1 without a limit
--       | {'again', last seq, entries}: an earlier attempt has stored so many entries
--       | {'full', setting}: limit or max_bytes leaves no room
--       | {'never'}: the entries exceed the limits of an empty task
--       | {'gone'}: there is no such task | {'indexed'}: the task is indexed, use put_indexed.lua
--@include task capacity waiters puts

begin_writing()
local known, gone = numbers(task, 'last', 'limit', 'max_bytes', 'bytes', 'put', 'samples_put',
  'bytes_put', 'indexed')
if gone then
  return {'gone'}
end
local before, limit, max_bytes, stored_bytes = known[1], known[2], known[3], known[4]
local producer, operation, count = ARGV[1], tonumber(ARGV[2]), #ARGV - 4
local last = before + count

local again = done_before(producer, operation)
if again then
  undo(before, count)
  return again
end

if known[8] == 1 then -- it became indexed after the producer opened it
  undo(before, count)
  return {'indexed'}
end

local now = now_ms()
local bytes = 0
for i = 5, #ARGV do
  bytes = bytes + tonumber(ARGV[i])
end
if (limit > 0 and count > limit) or (max_bytes > 0 and bytes > max_bytes) then
  undo(before, count)
  return {'never'}
end
local left = -1
if limit > 0 then
  left = limit - redis.call('XLEN', stream)
  if left < reserved_before('#room', producer, now) then
    undo(before, count)
    return {'full', 'limit'}
  end
end
if max_bytes > 0 then
  if stored_bytes + bytes > max_bytes then
    undo(before, count)
    return {'full', 'max_bytes'}
  end
  for i = 1, count do
    redis.call('HSET', key('sizes'), string.format('%.0f', before + i), ARGV[4 + i])
  end
  add(task, 'bytes', bytes)
end

local filtered = tonumber(ARGV[4])
count_put(producer, operation, last, count, {known[5], known[6], known[7]}, tonumber(ARGV[3]), bytes,
  filtered)
for _, group in ipairs(groups()) do
  local state = key('group', group)
  redis.call('HINCRBY', state, 'put', count + filtered)
  add(state, 'filtered', filtered)
  wake(group, redis.call('HINCRBY', state, 'waiting', count), now)
end
if limit > 0 or max_bytes > 0 then
  dequeue('#room', producer)
  wake('#room', room_left(), now)
end
return {'ok', last, left}
