-- Change settings of a task.
-- KEYS[1] stream
-- ARGV    revision, expected, who, name, value, ...
--         revision: random name of the changed settings; expected: of those that the caller has seen
--         who: the caller, for the record of changes; a value of '' removes the setting
-- Returns {'ok', ...} as task/open; repeated, it changes nothing
--       | {'changed'}: the settings are others than the caller has seen | {'gone'}: there is no such task
--       | {'unsortable'}: scripts cannot compute the scores of the order, and groups are stored
--       | {'unversioned'} | {'blocked', ...}: as task/open
--@include task settings misfits changing uncounted permissions

check_permissions(KEYS[1])
begin_writing()
local stored = redis.call('HGET', task, 'revision')
if not stored then
  return {'gone'}
elseif stored == ARGV[1] then
  return all_settings()
elseif stored ~= ARGV[2] then
  return {'changed'}
end
check_puts()
local values, implied, configured = {}, noted_settings('implied'), noted_settings('configured')
for i = 4, #ARGV, 2 do
  local name, value = ARGV[i], ARGV[i + 1]
  values[name], implied[name] = value ~= '' and value, nil
  configured[name] = name ~= 'order' and name ~= 'sampled' and name ~= 'tags' or nil
end
local refused = misfit(values)
if refused then
  return refused
end
if values.order and not can_sort_by(values.order) then
  return {'unsortable'}
end
note_settings('implied', implied)
note_settings('configured', configured)
if change(values, ARGV[1], ARGV[3]) then
  redis.call('HINCRBY', task, 'generation', 1)
end
return all_settings()
