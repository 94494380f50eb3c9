-- Begin to restore a task, or give up. The stage of an earlier attempt is deleted.
-- KEYS[1] stream
-- ARGV    token, ttl_ms, ever put
--         token: name of this attempt: <number>-<random>; ttl_ms: how long the attempt is known, 0: give
--         it up; ever put: number of the task that is to be replaced
-- Returns {'begun', {field, value, ...} of the task, consumer group, ...}
--       | {'used', stored now}: the task holds something, or something was put into it since
--       | {'overtaken'}: an attempt with a larger number has begun; a number of 0 is never overtaken
--       | {'given up'}
--@include task settings stage permissions

check_permissions(KEYS[1])
begin_writing()
local token, ttl_ms = ARGV[1], tonumber(ARGV[2])
local earlier = redis.call('GET', key('restoring'))

local function number_of(name)
  return tonumber(string.match(name, '^%d+'))
end

if ttl_ms == 0 then
  drop_stage(token)
  if earlier == token then
    redis.call('DEL', key('restoring'))
  end
  return {'given up'}
end
if stored_now() > 0 or ever_put() ~= tonumber(ARGV[3]) then
  return {'used', stored_now()}
end
if earlier and earlier ~= token then
  if number_of(token) > 0 and number_of(earlier) > number_of(token) then
    return {'overtaken'}
  end
  drop_stage(earlier)
end
redis.call('SET', key('restoring'), token, 'PX', ttl_ms)
return {'begun', task_fields(), unpack(groups())}
