-- Delete the task: entries, consumer groups, ledger and settings. Some of its waiters are woken.
-- KEYS[1] stream
-- ARGV    the call `Clear` of redrb/stream/task/calls.py; the incarnation of the task to delete
-- Returns its reply
--@include task removal permissions

local ask = cmsgpack.unpack(ARGV[1])
if (redis.call('HGET', task, 'incarnation') or '') ~= ARGV[2] then
  return cmsgpack.pack(nil)
end
check_permissions(KEYS[1])
begin_writing()
local stored = redis.call('XLEN', stream)
delete_task(groups())
redis.call('SET', key('removed'), ARGV[2] .. ' ' .. ask.who, 'PX', ask.ttl_ms)
return cmsgpack.pack(stored)
