-- Delete the task: entries, consumer groups, ledger and settings. Some of its waiters are woken.
-- KEYS[1] stream
-- ARGV    incarnation, who, ttl_ms
--         incarnation: of the task to delete. Repeated, the script deletes nothing, so a task that was
--         created meanwhile stays
--         who: the caller; for ttl_ms processes that still use the task learn that it has removed it
-- Returns {'cleared', entries deleted} | {'gone'}: there is no task of this incarnation
--@include task membership permissions

if (redis.call('HGET', task, 'incarnation') or '') ~= ARGV[1] then
  return {'gone'}
end
check_permissions(KEYS[1])
begin_writing()
local stored = redis.call('XLEN', stream)
delete_task(groups())
if ARGV[2] then
  redis.call('SET', key('removed'), ARGV[1] .. ' ' .. ARGV[2], 'PX', ARGV[3])
end
return {'cleared', stored}
