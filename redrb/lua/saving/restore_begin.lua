-- Begin to restore a task, or give up. The stage of an earlier attempt is deleted.
-- KEYS[1] stream
-- ARGV    token, ttl_ms
--         token: name of this attempt; ttl_ms: how long the attempt is known, 0: give it up
-- Returns {entries ever put, filtered or too stale on arrival, entries and dead letters stored now,
--         {field, value, ...} of the task, consumer group, ...}
--@include task stage settings

begin_writing()
local token, ttl_ms = ARGV[1], tonumber(ARGV[2])
local earlier = redis.call('GET', key('restoring'))
if ttl_ms == 0 then
  drop_stage(token)
  if earlier == token then
    redis.call('DEL', key('restoring'))
  end
else
  if earlier and earlier ~= token then
    drop_stage(earlier)
  end
  redis.call('SET', key('restoring'), token, 'PX', ttl_ms)
end
return {number(puts, 'put') + number(task, 'filtered') + number(task, 'arrived_stale'),
  redis.call('XLEN', stream) + redis.call('XLEN', key('dead')),
  task_fields(), unpack(groups())}
