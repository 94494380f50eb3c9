-- Says which settings do not fit together: the rules of `TaskSettings.check_whole`, where several processes
-- have given some each.
--@include task

-- Why the settings of the task, with the changes to `values` (name -> value, false for none), do not fit
-- together: a reply, or nil.
local function misfit(values)
  local function setting(name)
    if values[name] ~= nil then
      return values[name]
    end
    return redis.call('HGET', task, name)
  end
  if setting('eviction') == 'stalest' and setting('order') ~= 'stalest' and not setting('max_staleness') then
    return {outcome = 'unversioned'}
  end
  if setting('groups_per_version') then
    for name, only in pairs({capacity = false, max_reads = '1'}) do
      local value = setting(name)
      if value and value ~= only then
        return {outcome = 'excluded', setting = name, value = value}
      end
    end
  end
  if setting('capacity') and tonumber(setting('limit') or '0') > 0 then
    return {outcome = 'bounded_twice', setting = 'limit', value = setting('limit')}
  end
end
