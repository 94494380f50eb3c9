-- Refuse an attempt that failed, unless its version was committed after all.
-- KEYS[1] versions
-- ARGV    token, version
-- Returns {'ok', whether the trash has keys}: the caller deletes these, and all of its own | {'committed'}
--@include weights permissions

local committed = at(tonumber(ARGV[2]))
if committed and committed.token == ARGV[1] then
  return {'committed'}
end
check_permissions(pins)
check_keys()
begin_writing()
local noted = redis.call('HGET', attempts, ARGV[1])
if noted then
  discard_attempt(noted)
  redis.call('HDEL', attempts, ARGV[1])
end
return {'ok', redis.call('EXISTS', trash)}
