-- Tell a task the newest weight version.
-- KEYS[1] stream
-- ARGV    version
-- Returns {'ok', version}: the newest version that the task knows | {'gone'}: there is no such task
--@include task

begin_writing()
if not exists() then
  return {'gone'}
end
local version = math.max(number(task, 'version'), tonumber(ARGV[1]))
redis.call('HSET', task, 'version', string.format('%.0f', version))
return {'ok', version}
