-- Queue a producer for room. A producer that is woken runs this again.
-- KEYS[1] stream
-- ARGV    the call `AskRoom` of redrb/stream/put/calls.py
-- Returns its reply
--@include task put_record clock capacity waiters waking puts permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local producer, count = ask.producer, #ask.sizes
local limit, max_bytes = number(task, 'limit'), number(task, 'max_bytes')
-- an entry larger than max_bytes needs no room: the put refuses it
if ask.ttl_ms == 0 or not exists() or (max_bytes > 0 and ask.sizes[1] > max_bytes) then
  dequeue('#room', producer)
  wake_room()
  return cmsgpack.pack({granted = count, setting = ''})
end
local now = set_clock()
remove_orphans(last_counted(), '+') -- they would take room for ever
local granted, setting = count, ''
if limit > 0 then
  local left = limit - redis.call('XLEN', stream)
  left = left - reserved_before('#room', producer, now, left)
  granted, setting = math.max(math.min(count, left), 0), 'limit'
end
local max_waiting = number(task, 'max_waiting')
if max_waiting > 0 then
  local left = waiting_left(max_waiting, 0)
  left = left - reserved_before('#room', producer, now, left)
  if left < granted then
    granted, setting = math.max(left, 0), 'max_waiting'
  end
end
if max_bytes > 0 and granted > 0 then
  local free = max_bytes - number(task, 'bytes')
  for i = 1, granted do -- bound: entries of the put
    free = free - ask.sizes[i]
    if free < 0 then
      granted, setting = i - 1, 'max_bytes'
      break
    end
  end
end
enqueue('#room', producer, math.max(granted, 1), ask.ttl_ms, now)
return cmsgpack.pack({granted = granted, setting = setting})
