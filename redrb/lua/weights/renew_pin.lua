-- Renew a reader's pin, or remove it.
-- KEYS[1] versions
-- ARGV    the call `RenewPin` of redrb/weights/wire/calls.py
-- Returns its reply
--@include weights

local ask = cmsgpack.unpack(ARGV[1])
local pin = redis.call('HGET', pins, ask.reader)
local low, high = string.match(pin or '', '^(%d+) (%d+) ')
if not low then
  return cmsgpack.pack(false)
end
if ask.ttl_ms == 0 then
  redis.call('HDEL', pins, ask.reader)
  return cmsgpack.pack(true)
end
begin_writing()
redis.call('HSET', pins, ask.reader,
  string.format('%s %s %.0f %.0f', low, high, server_ms() + ask.ttl_ms, ask.ttl_ms))
return cmsgpack.pack(true)
