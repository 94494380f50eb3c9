-- Renew a reader's pin, or remove it.
-- KEYS[1] versions
-- ARGV    reader, ttl_ms
--         ttl_ms: how long the pin lasts; 0: remove it
-- Returns 'held' | 'gone': the reader had no pin
--@include weights

local pin = redis.call('HGET', pins, ARGV[1])
local low, high = string.match(pin or '', '^(%d+) (%d+) ')
if not low then
  return 'gone'
end
if ARGV[2] == '0' then
  redis.call('HDEL', pins, ARGV[1])
  return 'held'
end
begin_writing()
redis.call('HSET', pins, ARGV[1], string.format('%s %s %.0f %.0f', low, high, server_ms() + ARGV[2], ARGV[2]))
return 'held'
