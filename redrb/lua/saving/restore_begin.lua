-- Begin to restore a task, or give up. The restore area of an earlier attempt is deleted.
-- KEYS[1] stream
-- ARGV    the call `BeginRestore` of redrb/stream/saving/calls.py
-- Returns its reply
--@include task settings restore_area permissions

check_permissions(KEYS[1])
begin_writing()
local ask = cmsgpack.unpack(ARGV[1])
local token = ask.token
local earlier = redis.call('GET', key('restoring'))

local function number_of(name)
  return tonumber(string.match(name, '^%d+'))
end

if ask.ttl_ms == 0 then
  drop_area(token)
  if earlier == token then
    redis.call('DEL', key('restoring'))
  end
  return cmsgpack.pack({outcome = 'given up'})
end
if stored_now() > 0 or ever_put() ~= ask.put then
  return cmsgpack.pack({outcome = 'used'})
end
if earlier and earlier ~= token then
  if number_of(token) > 0 and number_of(earlier) > number_of(token) then
    return cmsgpack.pack({outcome = 'overtaken'})
  end
  drop_area(earlier)
end
redis.call('SET', key('restoring'), token, 'PX', ask.ttl_ms)
return cmsgpack.pack({outcome = 'begun', fields = task_fields(), groups = groups()})
