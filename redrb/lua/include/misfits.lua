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
    for name, only in pairs({capacity = false, partitions = false, max_reads = '1'}) do
      local value = setting(name)
      if value and value ~= only then
        return {outcome = 'excluded', setting = name, value = value}
      end
    end
  end
  if setting('capacity') and tonumber(setting('limit') or '0') > 0 then
    return {outcome = 'bounded_twice', setting = 'limit', value = setting('limit')}
  end
  local spi, size, least, high = string.match(setting('rate') or '', '^(%S+) (%S+) (%S+) (%S+)')
  if not spi then
    return nil
  elseif setting('partitions') then
    return {outcome = 'undivided'}
  end
  spi, size, least = tonumber(spi), tonumber(size), tonumber(least) or -math.huge
  local reads = tonumber(setting('max_reads') or setting('default_max_reads') or '1')
  if (tonumber(high) or math.huge) < math.huge and reads > 0 and spi > reads then
    return {outcome = 'overread', value = string.format('%.17g', spi), groups = reads}
  end
  for _, name in ipairs({'limit', 'capacity'}) do
    local most, needed = tonumber(setting(name) or '0'), size
    if least > -1e15 and (name == 'limit' or reads > 0) then
      needed = math.max(needed, math.ceil((least + 1) / spi - 1e-6))
    end
    if name == 'limit' and least > -1e15 and spi < reads then
      needed = 0
    end
    if most > 0 and (needed == 0 or needed > most) then
      return {outcome = 'blocked', setting = name, value = string.format('%d', most), groups = needed,
        gives_limit = values[name] and true or false}
    end
  end
end
