-- Tell a task the newest weight version.
-- KEYS[1] stream
-- ARGV    version
-- Returns the version that the task knows, or -1 where there is no task.
--@include task

begin_writing()
if not exists() then
  return -1
end
local version = math.max(number(task, 'version'), tonumber(ARGV[1]))
redis.call('HSET', task, 'version', string.format('%.0f', version))
return version
